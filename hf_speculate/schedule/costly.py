"""The draft length of a model or head: the K that ends the rest of the call soonest."""

import math
from collections.abc import Container, Sequence
from typing import NamedTuple

_OVERSHOOT = 0.5  # share of the tokens past the end of the last round that shorter drafts save
# mean of the largest of n normal numbers, in standard deviations
_SPREAD = (0.0, 0.0, 0.56, 0.85, 1.03, 1.16, 1.27, 1.35, 1.42)


class RoundCosts(NamedTuple):
    """Seconds of the rounds to come."""

    step_s: float  # a plain step of all rows
    rounds_s: Sequence[float]  # [K_max + 1] a round of all rows by K
    alone_s: Sequence[float]  # [K_max + 1] a round of the row that ends last
    read_s: float  # reading what the source has not seen


def best_length(
    probabilities: Sequence[float],
    num_left: Sequence[int],
    costs: RoundCosts,
    lengths: Container[int],
) -> tuple[int, float]:
    """Return the best K >= 1, and plain seconds over seconds of the rest of the call with it.

    Args:
        probabilities: [K_max] of each token that it is accepted with all before it.
        num_left: [N] tokens that each row may still emit.
        costs: seconds of the rounds to come.
        lengths: the K to choose from.
    """
    longest = max(num_left)
    num_close = sum(left > longest - math.sqrt(longest) for left in num_left)
    spread = _SPREAD[min(num_close, len(_SPREAD) - 1)]
    mean = square = 1.0  # of the tokens of a round, and of their squares
    best, best_gain = 0, 0.0
    for num, probability in enumerate(probabilities, 1):
        mean, square = mean + probability, square + (2 * num + 1) * probability
        if num not in lengths:
            continue
        overshoot = (square / mean - 1) / 2
        num_rounds = max((longest + _OVERSHOOT * overshoot) / mean, 1.0)
        deviation = math.sqrt(max(square - mean**2, 0.0) * num_rounds)
        num_late = min(spread * deviation / mean, longest - num_rounds)
        seconds = num_rounds * costs.rounds_s[num] + num_late * costs.alone_s[num] + costs.read_s
        gain = longest * costs.step_s / seconds
        if gain > best_gain:
            best, best_gain = num, gain
    return best, best_gain
