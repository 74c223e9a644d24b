"""The typical rule on rows that are laws already."""

import math
from dataclasses import dataclass

from torch import Tensor

from ._rows import row_sum
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


def _entropy(law: Tensor, probs: Tensor, epsilon: float) -> Tensor:
    """Entropy in nats [B, K] of `law` and its `probs` [B, K, V]; `epsilon` goes inside the logarithm."""
    if epsilon > 0.0:
        return -row_sum((probs + epsilon).log_().mul_(probs))
    below_top = (law - law.amax(-1, keepdim=True)).clamp_(min=LOG_OF_NOTHING)
    return -probs.amax(-1).log() - row_sum(below_top.mul_(probs))


def accept_typical(law: Tensor, token_ids: Tensor, rule: TypicalRule) -> Tensor:
    """Judge every position by itself.

    Args:
        law: [B, K, V] float32.
        token_ids: [B, K] int64 in [0, V).
        rule: its numbers.

    Returns:
        [B, K] bool, False where a row has no law.
    """
    law = law.contiguous()
    probs = law.softmax(-1)
    entropy = _entropy(law, probs, rule.entropy_epsilon)
    thresholds = (-entropy).exp_().mul_(rule.alpha).clamp_(max=rule.threshold)
    return probs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) > thresholds
