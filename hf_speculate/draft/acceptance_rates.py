"""Estimates how many drafted tokens will be accepted, by kind of draft and by row."""

from collections.abc import Sequence

_DECAY = 0.97  # of what was seen, per token judged: texts change
_PRIOR_WEIGHT = 4.0  # of the prior, in tokens, against what was seen of the row
_SUFFIX_PRIORS = (0.5, 0.6, 0.7, 0.8, 0.9)  # by doubling lengths of the match: 1, 2-3, 4-7, 8-15, 16 and more
_MODEL_PRIOR = 0.7
_MODEL_POSITIONS = 4  # kinds of a model's tokens: the first, second, third, and those after


class Rates:
    """Accepted over judged tokens of each kind and row, with decay.

    Rows learn nothing of each other: what a seed draws must not depend on a row's neighbours.

    Args:
        priors: [kinds] rates before anything was seen, in (0, 1).
        num_rows: B.
    """

    def __init__(self, priors: Sequence[float], num_rows: int):
        self._priors = priors
        self._rows = [[(0.0, 0.0)] * len(priors) for _ in range(num_rows)]  # accepted, judged

    def observe(self, row: int, kinds: Sequence[int], num_accepted: int) -> None:
        """Learn from one row's draft: its tokens that were judged, of which at most the last was refused."""
        counts = self._rows[row]
        for place, kind in enumerate(kinds):
            accepted, judged = counts[kind]
            counts[kind] = _DECAY * accepted + (place < num_accepted), _DECAY * judged + 1

    def expected(self, row: int, kinds: Sequence[int]) -> float:
        """Tokens of a row's draft that will be accepted."""
        total, prefix = 0.0, 1.0
        for kind in kinds:
            prefix *= self._rate(row, kind)
            total += prefix
        return total

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in that order; there are none before the first call."""
        self._rows = [self._rows[row] for row in indices] if self._rows else []

    def _rate(self, row: int, kind: int) -> float:
        accepted, judged = self._rows[row][kind]
        return (accepted + _PRIOR_WEIGHT * self._priors[kind]) / (judged + _PRIOR_WEIGHT)


def suffix_rates(num_rows: int) -> Rates:
    """Rates of tokens copied after a match; their kinds are those of `suffix_kinds`."""
    return Rates(_SUFFIX_PRIORS, num_rows)


def model_rates(num_rows: int) -> Rates:
    """Rates of a draft model's tokens; their kinds are those of `model_kinds`."""
    return Rates((_MODEL_PRIOR,) * _MODEL_POSITIONS, num_rows)


def suffix_kinds(match_len: int, num: int) -> list[int]:
    """[num] kinds of tokens copied after a match: an accepted token makes the match of the next one longer."""
    last = len(_SUFFIX_PRIORS)
    return [min((match_len + place).bit_length(), last) - 1 for place in range(num)]


def model_kinds(num: int) -> list[int]:
    """[num] kinds of a model's tokens, by position."""
    return [min(place, _MODEL_POSITIONS - 1) for place in range(num)]
