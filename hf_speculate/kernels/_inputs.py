"""Validated inputs of a backend."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .errors import ConfigError


class Round(NamedTuple):
    """Target logits and drafted tokens of one round."""

    target_logits: Tensor  # [B, K+1, V] any float dtype
    draft_token_ids: Tensor  # [B, K] int32 or int64, may be outside [0, V)
    draft_lens: Tensor | None  # [B] int32 or int64, may be outside 0..K; None means K for all rows


class Warp(NamedTuple):
    """Temperature and cutoffs, applied to raw logits."""

    temperature: float | Tensor = 1.0  # a float or [B], >= 0; 0 means argmax
    # [B, ...], thresholds of the scaled logits; logits below are masked
    row_cutoffs: Tensor | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether all rows take the argmax; False for a tensor, which is never read."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0.0


# Bins of a row's histogram, by the distance from its largest entry.
NUM_BINS, BINS_PER_NAT = 1024, 64


class Cut(NamedTuple):
    """Cutoffs of a draft distribution."""

    top_k: int  # entries
    top_p: float  # share of the mass; above 1: all of it
    most_below: float  # largest distance from the maximum, in nats; infinity: any


class WarpedDraw(NamedTuple):
    """Memory for one draw of a round."""

    token_ids: Tensor  # [B] int64, contiguous
    logsumexp: Tensor  # [B] float32, any stride
    logits: Tensor  # [B, V] float32 after the cut, contiguous rows


class Proposal(NamedTuple):
    """Draft distribution of the drafted tokens."""

    logits: Tensor  # [B, K, V] any float dtype
    logsumexp: Tensor | None  # [B, K] float32; None if not computed yet


class Attention(NamedTuple):
    """Inputs of attention for few queries; see `attention.attend`."""

    query: Tensor  # [B, g*H, Q, D]
    key: Tensor  # [B, H, T, D]
    value: Tensor  # [B, H, T, D]
    # [B or 1, Q, 2] int32, the columns seen by a query: the first, and one past the last
    spans: Tensor
    scaling: float | None = None  # factor of the scores; None: 1 / sqrt(D)
    softcap: float | None = None  # limit of the scores; None: no limit
    sinks: Tensor | None = None  # [g*H], a score of each head without a value


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
