"""Acceptance rates of drafted tokens by row and kind of token, estimated from decayed counts."""

from collections.abc import Sequence

from torch import nn

from hf_speculate.model_state import model_state

_DECAY = 0.97  # factor of a row's counts per verified token, because texts change
_SHARED_DECAY = 0.998  # factor of the shared counts per verified token
_WEIGHT = 6.0  # weight of the shared rate, in tokens
_PRIOR_WEIGHT = 4.0  # weight of the prior in the shared counts, in tokens
# Rates by match length, doubling from entry to entry: 1, 2-3, 4-7, 8-15, 16 and more tokens.
_SUFFIX_PRIORS = (0.3, 0.5, 0.7, 0.8, 0.9)
# A token within a forced text, and its last token, which the target may merge with later text.
_FORCED_PRIORS = (0.95, 0.6)
_MODEL_PRIORS = (0.7,) * 4  # the first, second and third token of a draft, and all later ones


class SharedRates:
    """Shared acceptance rates, from which each row starts.

    The rows of all calls with one target may share the rates.

    Args:
        priors: the rate of each kind of token before any token has been verified.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self.counts = [(_PRIOR_WEIGHT * prior, _PRIOR_WEIGHT) for prior in priors]

    @classmethod
    def of_lookups(cls, model: nn.Module) -> "SharedRates":
        """Return the rates for tokens after suffix matches, over all calls with a target."""
        return model_state(model).get(cls, suffix_rates)

    @classmethod
    def of_forced_texts(cls, model: nn.Module) -> "SharedRates":
        """Return the rates for forced tokens, over all calls with a target."""
        return model_state(model).get((cls, "forced texts"), forced_rates)

    def add(self, bucket: int, is_accepted: bool) -> None:
        """Count one verified token."""
        accepted, verified = self.counts[bucket]
        accepted, verified = _SHARED_DECAY * accepted, _SHARED_DECAY * verified
        self.counts[bucket] = accepted + is_accepted, verified + 1


def suffix_rates() -> SharedRates:
    """Return the initial rates for tokens after suffix matches."""
    return SharedRates(_SUFFIX_PRIORS)


def forced_rates() -> SharedRates:
    """Return the initial rates for forced tokens."""
    return SharedRates(_FORCED_PRIORS)


def model_rates() -> SharedRates:
    """Return the initial rates for a draft model's tokens."""
    return SharedRates(_MODEL_PRIORS)


class RowRates:
    """Acceptance rates of one row.

    The shared rates dominate until the row has many counts of its own.
    """

    def __init__(self, shared: SharedRates) -> None:
        self._shared = shared
        self._counts = [(0.0, 0.0)] * len(shared.counts)

    def observe(self, buckets: Sequence[int], num_accepted: int) -> None:
        """Count the verified tokens of a draft; at most the last one was not accepted."""
        for position, bucket in enumerate(buckets):
            is_accepted = position < num_accepted
            accepted, verified = self._counts[bucket]
            self._counts[bucket] = _DECAY * accepted + is_accepted, _DECAY * verified + 1
            self._shared.add(bucket, is_accepted)

    def probabilities(self, buckets: Sequence[int]) -> list[float]:
        """Return each token's probability of being accepted together with all tokens before it."""
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
    """Return the kinds [num_tokens] of the tokens after a match.

    Each accepted token makes the match of the next token longer.
    """
    last = len(_SUFFIX_PRIORS)
    return [min((match_len + at).bit_length(), last) - 1 for at in range(num_tokens)]


def forced_buckets(num_tokens: int, is_whole: bool) -> list[int]:
    """Return the kinds [num_tokens] of forced tokens.

    If `is_whole`, the last token ends the forced text.
    """
    return [int(is_whole and at == num_tokens - 1) for at in range(num_tokens)]


def model_buckets(num_tokens: int) -> list[int]:
    """Return the kinds [num_tokens] of a draft model's tokens by position."""
    return [min(at, len(_MODEL_PRIORS) - 1) for at in range(num_tokens)]
