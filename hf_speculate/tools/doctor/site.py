"""Where a check runs, and how it says what it saw."""

from collections.abc import Callable
from typing import NamedTuple

import torch

NOT_RUN = "not run"  # beside what `hf_speculate.options.verdicts.verdict` names


class Site(NamedTuple):
    """A device, and the sizes that checks have on it."""

    device: torch.device
    vocab_size: int = 50_257  # columns of the kernels' rows, which then start at addresses of any alignment
    num_draft_tokens: int = 5  # tokens in the kernels' rounds
    width: int = 256  # width of the hidden states of models
    max_new_tokens: int = 48
    batch_sizes: tuple[int, ...] = (1, 4)  # rows of batches of texts
    is_simulated: bool = False


Check = Callable[[Site], str]
"""Returns what it saw, in words; raises `WrongResult`, `NotHere`, or whatever goes wrong."""


class WrongResult(Exception):
    """A result differs from its reference."""


class NotHere(Exception):
    """A device, or what is installed, lacks what a check needs."""


def require(is_right: bool, what: str) -> None:
    """Raise `WrongResult` with what was found, unless it is right."""
    if not is_right:
        raise WrongResult(what)
