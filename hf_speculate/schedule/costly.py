"""Draft length for a model or head: choose the K that is expected to end the call soonest."""

from collections.abc import Container, Sequence
from typing import NamedTuple


class RoundCosts(NamedTuple):
    """Expected seconds of the next rounds."""

    step_s: float  # a plain step with all rows
    rounds_s: Sequence[float]  # [K_max + 1] a round with all rows, by K
    read_s: float  # time for the source to read its unread tokens


def best_length(
    probabilities: Sequence[float], num_left: int, costs: RoundCosts, lengths: Container[int]
) -> tuple[int, float]:
    """Return the best K >= 1 and its gain; 0 and 0.0 if there is no K to choose from.

    The gain is the ratio of plain seconds to speculative seconds for the rest of the call.

    Args:
        probabilities: [K_max] probabilities of accepting each token and all tokens before it.
        num_left: Number of tokens that the longest row may still emit.
        costs: Expected seconds of the next rounds.
        lengths: Allowed values of K.
    """
    mean_tokens, best, best_gain = 1.0, 0, 0.0
    for draft_len, probability in enumerate(probabilities, 1):
        mean_tokens += probability
        if draft_len not in lengths:
            continue
        num_rounds = max(num_left / mean_tokens, 1.0)
        gain = num_left * costs.step_s / (num_rounds * costs.rounds_s[draft_len] + costs.read_s)
        if gain > best_gain:
            best, best_gain = draft_len, gain
    return best, best_gain
