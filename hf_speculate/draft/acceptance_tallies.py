"""Acceptance tallies: counts of drafted and accepted tokens of one target's drafts over all calls.

Over all calls, because a schedule stops drafting early in one if next to nothing is accepted.
"""

import threading
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from hf_speculate.model_state import model_state


class DraftCounts(NamedTuple):
    """Tokens of a draft."""

    num_drafted: int
    num_accepted: int


class AcceptanceBound(NamedTuple):
    """The least acceptance rate of a draft that fits its target."""

    least_rate: float  # accepted over drafted tokens, in [0, 1]
    num_drafted: int  # tokens after which the rate is compared


class AcceptanceTallies:
    """Counts of one target's drafts, which are held weakly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_draft: WeakKeyDictionary[object, tuple[DraftCounts, bool]] = WeakKeyDictionary()

    @classmethod
    def of(cls, model: nn.Module) -> "AcceptanceTallies":
        """The counts of a target."""
        return model_state(model).get(cls, cls)

    def add(self, draft: object, counts: DraftCounts, bound: AcceptanceBound) -> bool:
        """Count a call; whether the acceptance rate of all calls is below a bound, the first time that it is so."""
        with self._lock:
            before, was_low = self._by_draft.get(draft, (DraftCounts(0, 0), False))
            num_drafted, num_accepted = (sum(pair) for pair in zip(before, counts, strict=True))
            is_low = (
                num_drafted >= bound.num_drafted and num_accepted < bound.least_rate * num_drafted
            )
            self._by_draft[draft] = DraftCounts(num_drafted, num_accepted), was_low or is_low
            return is_low and not was_low
