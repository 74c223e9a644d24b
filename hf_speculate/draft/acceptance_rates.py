"""Acceptance-rate estimates: decayed counts of verified and accepted tokens, by row and type of drafted token."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

_DECAY = 0.97  # factor of the counts, per verified token: sequences change
_PRIOR_WEIGHT = 4.0  # weight of the prior, in tokens
SUFFIX_PRIORS = (0.5, 0.6, 0.7, 0.8, 0.9)  # by doubling match lengths: 1, 2-3, 4-7, 8-15, 16 and more
MODEL_PRIORS = (0.7,) * 4  # the first, second and third token of a draft, and all later ones


class AcceptanceCounts:
    """Decayed counts of verified and accepted tokens, in several buckets of tokens."""

    def __init__(self, num_buckets: int):
        self.accepted = [0.0] * num_buckets
        self.verified = [0.0] * num_buckets

    def add(self, bucket: int, is_accepted: bool, decay: float = 1.0) -> None:
        """Count one verified token, after the bucket's counts were multiplied by `decay`."""
        self.accepted[bucket] = decay * self.accepted[bucket] + is_accepted
        self.verified[bucket] = decay * self.verified[bucket] + 1

    def decay(self, factor: float) -> None:
        """Multiply the counts of all buckets by `factor` in [0, 1]."""
        self.accepted = [factor * count for count in self.accepted]
        self.verified = [factor * count for count in self.verified]

    def rate(self, bucket: int, prior: float, prior_weight: float) -> float:
        """Accepted over verified tokens of a bucket, with a prior that weighs `prior_weight` tokens."""
        return (self.accepted[bucket] + prior_weight * prior) / (self.verified[bucket] + prior_weight)


class AcceptanceRates(AcceptanceCounts):
    """Acceptance rates of one row by bucket of tokens; shared counts would let other rows change a seed's sample."""

    def __init__(self, priors: Sequence[float]):
        super().__init__(len(priors))
        self._priors = priors

    def observe(self, buckets: Sequence[int], num_accepted: int) -> None:
        """Count the verified tokens of a draft; all but the last one at most were accepted."""
        for position, bucket in enumerate(buckets):
            self.add(bucket, position < num_accepted, _DECAY)

    def probabilities(self, buckets: Sequence[int]) -> Iterator[float]:
        """The probability of each token of a draft that it is accepted, with all before it."""
        rates = (self.rate(bucket, self._priors[bucket], _PRIOR_WEIGHT) for bucket in buckets)
        return accumulate(rates, mul)

    def expected(self, buckets: Sequence[int]) -> float:
        """The expected number of accepted tokens in a draft."""
        return sum(self.probabilities(buckets))

    def num_likely(self, buckets: Sequence[int], least: float) -> int:
        """The number of first tokens of a draft that are accepted with a probability of at least `least`."""
        return sum(probability >= least for probability in self.probabilities(buckets))


def suffix_buckets(match_len: int, num: int) -> list[int]:
    """[num] buckets of the tokens after a match; each accepted token lengthens the match of the next one."""
    last = len(SUFFIX_PRIORS)
    return [min((match_len + position).bit_length(), last) - 1 for position in range(num)]


def model_buckets(num: int) -> list[int]:
    """[num] buckets of a draft model's tokens, by position."""
    return [min(position, len(MODEL_PRIORS) - 1) for position in range(num)]
