"""Types of drafts whose steps are unrolled into one compiled unit."""

from typing import NamedTuple

from torch import Tensor

from hf_speculate.types import Stream

# Longer drafts would take long to compile; they run step by step.
MAX_UNROLLED_STEPS = 16


class Unrolled(NamedTuple):
    """The result of a unit."""

    token_ids: Tensor  # [B, K] int64
    token_logits: Tensor | None  # [B, K, V] if the verifier reads them
    logsumexp: Tensor | None  # [B, K] float32


class Choosing(NamedTuple):
    """How a unit chooses tokens, the same in all steps."""

    num_steps: int
    stream: Stream
    keeps_logits: bool
