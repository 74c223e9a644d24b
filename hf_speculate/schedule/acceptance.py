"""Acceptance model: estimate the acceptance rate of drafted tokens by position."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple


@dataclass(frozen=True)
class Tuning:
    """Weights of the acceptance model.

    Chosen from the table of means in tests/schedule/laboratory.
    """

    decay: float = 0.95  # factor of the counts per round
    slow_decay: float = 0.99  # factor of the first position's long-run counts per round
    plain_decay: float = 0.99  # factor of the counts per plain step, as texts change
    weight: float = 5.0  # weight of the previous position's rate, in observations
    first: tuple[float, float] = (1.6, 2.0)  # prior counts of accepted and drafted first tokens
    optimism: float = 0.5  # added in a trial to a rate based on one observation


TUNING = Tuning()


class DraftedRow(NamedTuple):
    """A row whose draft came from a model or head."""

    num_accepted: int
    num_drafted: int  # number of requested tokens, limited by the row's room


class Acceptance:
    """Estimates of the acceptance rate by draft position.

    A position that was never reached gets the estimate of the previous position.

    Args:
        max_draft_tokens: K_max, >= 1.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._accepted = [0.0] * max_draft_tokens
        self._drafted = [0.0] * max_draft_tokens
        self._long_run = TUNING.first

    def observe(self, rows: Sequence[DraftedRow]) -> None:
        """Add the rows of a round; the position at which a draft stops early counts as rejected."""
        self._forget(TUNING.decay)
        accepted, drafted = (TUNING.slow_decay * count for count in self._long_run)
        for row in rows:
            num_verified = min(row.num_accepted + 1, row.num_drafted, len(self._drafted))
            for position in range(num_verified):
                self._accepted[position] += position < row.num_accepted
                self._drafted[position] += 1
            if num_verified:
                accepted, drafted = accepted + (row.num_accepted > 0), drafted + 1
        self._long_run = accepted, drafted

    def observe_plain(self) -> None:
        """Decay past observations after a plain step."""
        self._forget(TUNING.plain_decay)

    def probabilities(self, is_optimistic: bool = False) -> list[float]:
        """Return the probabilities [K_max] of accepting each token and all tokens before it."""
        bonus = TUNING.optimism if is_optimistic else 0.0
        rate, rates = self._long_run[0] / self._long_run[1], []
        for accepted, drafted in zip(self._accepted, self._drafted, strict=True):
            rate = (accepted + TUNING.weight * rate) / (drafted + TUNING.weight)
            rates.append(min(rate + bonus / (1 + drafted) ** 0.5, 1.0))
        return list(accumulate(rates, mul))

    def _forget(self, share: float) -> None:
        self._accepted = [share * count for count in self._accepted]
        self._drafted = [share * count for count in self._drafted]
