"""The draft length of a model or head: the K that ends the rest of the call soonest."""

from collections.abc import Container, Sequence
from typing import NamedTuple


class RoundCosts(NamedTuple):
    """Seconds of the rounds to come."""

    step_s: float  # a plain step of all rows
    rounds_s: Sequence[float]  # [K_max + 1] a round of all rows by K
    read_s: float  # reading what the source has not seen


def best_length(
    probabilities: Sequence[float], num_left: int, costs: RoundCosts, lengths: Container[int]
) -> tuple[int, float]:
    """Return the best K >= 1, and plain seconds over seconds of the rest of the call with it.

    Args:
        probabilities: [K_max] of each token that it is accepted with all before it.
        num_left: tokens that the longest row may still emit.
        costs: seconds of the rounds to come.
        lengths: the K to choose from.
    """
    mean, best, best_gain = 1.0, 0, 0.0  # mean tokens of a round
    for num, probability in enumerate(probabilities, 1):
        mean += probability
        if num not in lengths:
            continue
        num_rounds = max(num_left / mean, 1.0)
        gain = num_left * costs.step_s / (num_rounds * costs.rounds_s[num] + costs.read_s)
        if gain > best_gain:
            best, best_gain = num, gain
    return best, best_gain
