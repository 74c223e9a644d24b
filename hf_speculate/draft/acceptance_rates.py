"""Acceptance rates of drafted tokens, by row and by the kind of token, from decayed counts."""

from collections.abc import Sequence

from torch import nn

from hf_speculate.model_state import model_state

_DECAY = 0.97  # factor of a row's counts per verified token: texts change
_SHARED_DECAY = 0.998  # factor of the shared counts per verified token
_WEIGHT = 6.0  # weight of the shared rate, in tokens
_PRIOR_WEIGHT = 4.0  # weight of the prior in the shared counts, in tokens
# By doubling match lengths: 1, 2-3, 4-7, 8-15, 16 and more tokens.
_SUFFIX_PRIORS = (0.3, 0.5, 0.7, 0.8, 0.9)
# A token within a forced text, and its last one; the target may merge the last one with later text.
_FORCED_PRIORS = (0.95, 0.6)
_MODEL_PRIORS = (0.7,) * 4  # the first, second and third token of a draft, and all later ones


class SharedRates:
    """Shared rates, from which each row starts.

    The rows of all calls with one target may share them.

    Args:
        priors: the rate of each kind of token before any was verified.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self.counts = [(_PRIOR_WEIGHT * prior, _PRIOR_WEIGHT) for prior in priors]

    @classmethod
    def of_lookups(cls, model: nn.Module) -> "SharedRates":
        """Return the rates of tokens after suffix matches in all calls with a target."""
        return model_state(model).get(cls, suffix_rates)

    @classmethod
    def of_forced_texts(cls, model: nn.Module) -> "SharedRates":
        """Return the rates of forced tokens in all calls with a target."""
        return model_state(model).get((cls, "forced texts"), forced_rates)

    def add(self, bucket: int, is_accepted: bool) -> None:
        """Count one verified token."""
        accepted, verified = self.counts[bucket]
        accepted, verified = _SHARED_DECAY * accepted, _SHARED_DECAY * verified
        self.counts[bucket] = accepted + is_accepted, verified + 1


def suffix_rates() -> SharedRates:
    """Return the rates of tokens after suffix matches before any was verified."""
    return SharedRates(_SUFFIX_PRIORS)


def forced_rates() -> SharedRates:
    """Return the rates of forced tokens before any was verified."""
    return SharedRates(_FORCED_PRIORS)


def model_rates() -> SharedRates:
    """Return the rates of a draft model's tokens before any was verified."""
    return SharedRates(_MODEL_PRIORS)


class RowRates:
    """Acceptance rates of one row.

    Until it has many counts of its own, those of all rows count.
    """

    def __init__(self, shared: SharedRates) -> None:
        self._shared = shared
        self._counts = [(0.0, 0.0)] * len(shared.counts)

    def observe(self, buckets: Sequence[int], num_accepted: int) -> None:
        """Count the verified tokens of a draft; all but the last one at most were accepted."""
        for position, bucket in enumerate(buckets):
            is_accepted = position < num_accepted
            accepted, verified = self._counts[bucket]
            self._counts[bucket] = _DECAY * accepted + is_accepted, _DECAY * verified + 1
            self._shared.add(bucket, is_accepted)

    def probabilities(self, buckets: Sequence[int]) -> list[float]:
        """Return the probability of each token of a draft to be accepted with all before it."""
        probability, probabilities = 1.0, []
        for bucket in buckets:
            accepted, verified = self._counts[bucket]
            shared_accepted, shared_verified = self._shared.counts[bucket]
            accepted += _WEIGHT * shared_accepted / shared_verified
            probability *= accepted / (verified + _WEIGHT)
            probabilities.append(probability)
        return probabilities

    def expected(self, buckets: Sequence[int]) -> float:
        """Return the expected number of accepted tokens in a draft."""
        return sum(self.probabilities(buckets))


def suffix_buckets(match_len: int, num_tokens: int) -> list[int]:
    """Return [num_tokens] kinds of the tokens after a match.

    Each accepted token lengthens the match of the next one.
    """
    last = len(_SUFFIX_PRIORS)
    return [min((match_len + at).bit_length(), last) - 1 for at in range(num_tokens)]


def forced_buckets(num_tokens: int, is_whole: bool) -> list[int]:
    """Return [num_tokens] kinds of forced tokens.

    If `is_whole`, the last one ends the forced text.
    """
    return [int(is_whole and at == num_tokens - 1) for at in range(num_tokens)]


def model_buckets(num_tokens: int) -> list[int]:
    """Return [num_tokens] kinds of a draft model's tokens, by position."""
    return [min(at, len(_MODEL_PRIORS) - 1) for at in range(num_tokens)]
