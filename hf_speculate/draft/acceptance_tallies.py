"""Acceptance tallies: counts of drafted and accepted tokens for one target's drafts.

The counts are summed over all calls, because the schedule of a single call stops drafting early if
almost nothing is accepted.
"""

import threading
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from hf_speculate.model_state import model_state


class DraftCounts(NamedTuple):
    """Token counts of a draft."""

    num_drafted: int
    num_accepted: int


class AcceptanceBound(NamedTuple):
    """Lower bound on the acceptance rate of a draft that matches the target."""

    least_rate: float  # accepted over drafted tokens, in [0, 1]
    num_drafted: int  # minimum number of drafted tokens before the rate is compared


class AcceptanceTallies:
    """Token counts of one target's drafts, which are held weakly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_draft: WeakKeyDictionary[object, tuple[DraftCounts, bool]] = WeakKeyDictionary()

    @classmethod
    def of(cls, model: nn.Module) -> "AcceptanceTallies":
        """Return the counts for a target."""
        return model_state(model).get(cls, cls)

    def add(self, draft: object, counts: DraftCounts, bound: AcceptanceBound) -> bool:
        """Add the counts of a call.

        Returns:
            True the first time that the acceptance rate over all calls is below the bound, False
            otherwise.
        """
        with self._lock:
            before, was_low = self._by_draft.get(draft, (DraftCounts(0, 0), False))
            num_drafted, num_accepted = (sum(pair) for pair in zip(before, counts, strict=True))
            is_low = (
                num_drafted >= bound.num_drafted and num_accepted < bound.least_rate * num_drafted
            )
            self._by_draft[draft] = DraftCounts(num_drafted, num_accepted), was_low or is_low
            return is_low and not was_low
