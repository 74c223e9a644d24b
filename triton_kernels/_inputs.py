"""What an operation hands to its implementation, checked."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .errors import ConfigError


class Round(NamedTuple):
    """One round's logits and drafts."""

    target_logits: Tensor  # [B, K+1, V] any float dtype
    draft_token_ids: Tensor  # [B, K] int32 or int64, not yet held to [0, V)
    draft_lens: Tensor | None  # [B] int32 or int64, not yet held to 0..K; None: K for all


class Warp(NamedTuple):
    """What acts on raw logits before they are a law."""

    temperature: float | Tensor = 1.0  # [B] where a tensor, >= 0; 0 takes the argmax
    row_cutoffs: Tensor | None = None  # [B, ...], after the temperature; entries below are dropped

    @property
    def is_greedy(self) -> bool:
        """Whether every row is known to take the argmax."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0.0


class Proposal(NamedTuple):
    """The laws that the drafted tokens were drawn from."""

    logits: Tensor  # [B, K, V] any float dtype, final
    logsumexp: Tensor | None  # [B, K] float32; None: to be computed


@dataclass(frozen=True)
class TypicalRule:
    """Numbers of typical acceptance: probability > min(threshold, alpha * exp(-entropy)).

    Args:
        threshold: in (0, 1).
        alpha: > 0.
        entropy_epsilon: >= 0, added inside the entropy's logarithm.
        samples: whether the token after the kept ones is drawn; else it is the argmax.

    Raises:
        ConfigError: a number is out of range.
    """

    threshold: float
    alpha: float
    entropy_epsilon: float
    samples: bool

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold < 1.0:
            raise ConfigError(f"posterior_threshold must be in (0, 1), got {self.threshold}; 0.09 is the usual value")
        if not (math.isfinite(self.alpha) and self.alpha > 0.0):
            raise ConfigError(f"posterior_alpha must be finite and > 0, got {self.alpha}; 0.3 is the usual value")
        if not (math.isfinite(self.entropy_epsilon) and self.entropy_epsilon >= 0.0):
            raise ConfigError(
                f"entropy_epsilon must be finite and >= 0, got {self.entropy_epsilon}; 0 is the exact entropy"
            )
