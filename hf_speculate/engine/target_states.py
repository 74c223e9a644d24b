"""Target states: the hidden states of the target that a drafter reads; most drafters read none."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_speculate.types import Scored


class TargetStates(Protocol):
    """The hidden states of the target that the drafter has not read, row by row."""

    capture: Any  # see `LanguageModel`
    wanted: bool | list[int]  # the value of `output_hidden_states` in the target's forward

    @property
    def counts(self) -> list[int]:
        """[B] number of states of each row; empty if there are none."""

    def add_prompt(self, output: Scored, num_tokens: Sequence[int], num_ahead: int) -> None:
        """Append states of the prompt, `num_ahead` columns before its end on, of the last `num_tokens` [B] tokens."""

    def add(self, output: Scored, counts: Sequence[int]) -> None:
        """Append the states of a round in which each row emitted `counts` [B] tokens."""

    def take(self, device: torch.device, counts: Sequence[int] | None = None) -> Tensor:
        """[B, N, D] of the first `counts` [B] states of each row, None for all, on a device; undefined past a row's.

        These are then forgotten.
        """
