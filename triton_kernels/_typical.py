"""The typical rule on rows that are laws already."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._rows import Masses, padded_like, row_masses, row_sum
from .errors import ConfigError

# exp(-200) is 0 in float32, and 0 times a finite number is 0, where 0 times -inf is not.
LOG_OF_NOTHING = -200.0


@dataclass(frozen=True)
class TypicalRule:
    """Numbers of the rule: probability > min(threshold, alpha * exp(-entropy))."""

    threshold: float
    alpha: float
    entropy_epsilon: float

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold < 1.0:
            raise ConfigError(f"posterior_threshold must be in (0, 1), got {self.threshold}; 0.09 is the usual value")
        if not (math.isfinite(self.alpha) and self.alpha > 0.0):
            raise ConfigError(f"posterior_alpha must be finite and > 0, got {self.alpha}; 0.3 is the usual value")
        if not (math.isfinite(self.entropy_epsilon) and self.entropy_epsilon >= 0.0):
            raise ConfigError(
                f"entropy_epsilon must be finite and >= 0, got {self.entropy_epsilon}; 0 is the exact entropy"
            )


def _entropy(law: Tensor, target: Masses, epsilon: float) -> Tensor:
    """Entropy in nats [B, K] of `law` [B, K, V]; `epsilon` goes inside the logarithm."""
    rows = padded_like(law)
    terms = rows[..., : law.shape[-1]]
    if epsilon > 0.0:
        torch.div(target.masses, target.sums.unsqueeze(-1), out=terms)
        terms.mul_((terms + epsilon).log_())
        return -row_sum(rows)
    torch.sub(law, law.amax(-1, keepdim=True), out=terms)
    terms.clamp_(min=LOG_OF_NOTHING).mul_(target.masses)
    return target.sums.log() - row_sum(rows) / target.sums


def accept_typical(law: Tensor, token_ids: Tensor, rule: TypicalRule) -> Tensor:
    """Judge every position by itself.

    Args:
        law: [B, K, V] float32.
        token_ids: [B, K] int64 in [0, V).
        rule: its numbers.

    Returns:
        [B, K] bool, False where a row has no law.
    """
    target = row_masses(law)
    thresholds = (-_entropy(law, target, rule.entropy_epsilon)).exp_().mul_(rule.alpha).clamp_(max=rule.threshold)
    masses = target.masses.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return masses > thresholds.mul_(target.sums)
