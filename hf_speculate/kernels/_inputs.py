"""Validated inputs for a backend."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .errors import ConfigError


class Round(NamedTuple):
    """The target logits and drafted tokens of one round."""

    target_logits: Tensor  # [B, K+1, V] any float dtype
    draft_token_ids: Tensor  # [B, K] int32 or int64, may be outside [0, V)
    draft_lens: Tensor | None  # [B] int32 or int64, may be outside 0..K; None means K for all rows


class Warp(NamedTuple):
    """Temperature and cutoffs, applied to raw logits."""

    temperature: float | Tensor = 1.0  # a float or [B], >= 0; 0 means argmax
    # [B, ...], thresholds for the scaled logits; smaller logits are masked
    row_cutoffs: Tensor | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether all rows take the argmax; False for a tensor, which is never read."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0.0


# Bins of a row's histogram, by distance from the largest entry.
NUM_BINS, BINS_PER_NAT = 1024, 64


class Cut(NamedTuple):
    """Cutoffs for a draft distribution."""

    top_k: int  # number of entries to keep
    top_p: float  # share of the mass to keep; above 1 for all of it
    most_below: float  # largest distance from the maximum, in nats; infinity if unlimited


class WarpedDraw(NamedTuple):
    """Output memory for one draw of a round."""

    token_ids: Tensor  # [B] int64, contiguous
    logsumexp: Tensor  # [B] float32, any stride
    logits: Tensor  # [B, V] float32 after the cut, contiguous rows


class Proposal(NamedTuple):
    """Distributions from which the tokens were drafted."""

    logits: Tensor  # [B, K, V] any float dtype
    logsumexp: Tensor | None  # [B, K] float32; None if not computed yet


class Attention(NamedTuple):
    """Inputs to attention for a few queries; see `attention.attend`."""

    query: Tensor  # [B, g*H, Q, D]
    key: Tensor  # [B, H, T, D]
    value: Tensor  # [B, H, T, D]
    # [B or 1, Q, 2] int32, the first column seen by each query, and one past the last
    spans: Tensor
    scaling: float | None = None  # factor for the scores; None for 1 / sqrt(D)
    softcap: float | None = None  # limit on the scores; None for no limit
    sinks: Tensor | None = None  # [g*H], a score per head that has no value


@dataclass(frozen=True)
class TypicalRule:
    """Parameters of typical acceptance: p(x) > min(threshold, alpha * exp(-entropy)).

    Args:
        threshold: in (0, 1).
        alpha: > 0.
        entropy_epsilon: >= 0, added inside the logarithm of the entropy.
        samples: whether the correction token is sampled; otherwise it is the argmax.

    Raises:
        ConfigError: a value is out of range.
    """

    threshold: float
    alpha: float
    entropy_epsilon: float
    samples: bool

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold < 1.0:
            raise ConfigError(
                f"posterior_threshold must be in (0, 1), got {self.threshold}; 0.09 is the usual "
                "value"
            )
        if not (math.isfinite(self.alpha) and self.alpha > 0.0):
            raise ConfigError(
                f"posterior_alpha must be finite and > 0, got {self.alpha}; 0.3 is the usual value"
            )
        if not (math.isfinite(self.entropy_epsilon) and self.entropy_epsilon >= 0.0):
            raise ConfigError(
                f"entropy_epsilon must be finite and >= 0, got {self.entropy_epsilon}; 0 is the "
                "exact entropy"
            )
