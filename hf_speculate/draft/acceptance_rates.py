"""Acceptance-rate estimates: decayed counts of verified and accepted tokens, and their use by row and kind of draft."""

from collections.abc import Sequence

_DECAY = 0.97  # of the counts, per verified token: sequences change
_PRIOR_WEIGHT = 4.0  # of the prior, in tokens
SUFFIX_PRIORS = (0.5, 0.6, 0.7, 0.8, 0.9)  # by doubling match lengths: 1, 2-3, 4-7, 8-15, 16 and more
MODEL_PRIORS = (0.7,) * 4  # the first, second and third token of a draft, and all later ones


class AcceptanceCounts:
    """Decayed counts of verified and accepted tokens, for several kinds of tokens."""

    def __init__(self, num_kinds: int):
        self.accepted = [0.0] * num_kinds
        self.verified = [0.0] * num_kinds

    def add(self, kind: int, is_accepted: bool, decay: float = 1.0) -> None:
        """Count one verified token, after the kind's counts were multiplied by `decay`."""
        self.accepted[kind] = decay * self.accepted[kind] + is_accepted
        self.verified[kind] = decay * self.verified[kind] + 1

    def decay(self, factor: float) -> None:
        """Multiply the counts of all kinds by `factor` in [0, 1]."""
        self.accepted = [factor * count for count in self.accepted]
        self.verified = [factor * count for count in self.verified]

    def rate(self, kind: int, prior: float, prior_weight: float) -> float:
        """Accepted over verified tokens of a kind, with a prior that weighs `prior_weight` tokens."""
        return (self.accepted[kind] + prior_weight * prior) / (self.verified[kind] + prior_weight)


class AcceptanceRates(AcceptanceCounts):
    """Acceptance rates of one row by kind of token; shared counts would let other rows change a seed's sample."""

    def __init__(self, priors: Sequence[float]):
        super().__init__(len(priors))
        self._priors = priors

    def observe(self, kinds: Sequence[int], num_accepted: int) -> None:
        """Count the verified tokens of a draft; all but the last one at most were accepted."""
        for position, kind in enumerate(kinds):
            self.add(kind, position < num_accepted, _DECAY)

    def expected(self, kinds: Sequence[int]) -> float:
        """The expected number of accepted tokens in a draft."""
        total, prefix = 0.0, 1.0
        for kind in kinds:
            prefix *= self.rate(kind, self._priors[kind], _PRIOR_WEIGHT)
            total += prefix
        return total


def suffix_kinds(match_len: int, num: int) -> list[int]:
    """[num] kinds of tokens after a match; each accepted token lengthens the match of the next one."""
    last = len(SUFFIX_PRIORS)
    return [min((match_len + position).bit_length(), last) - 1 for position in range(num)]


def model_kinds(num: int) -> list[int]:
    """[num] kinds of a draft model's tokens, by position."""
    return [min(position, len(MODEL_PRIORS) - 1) for position in range(num)]
