"""Schedule history: acceptance and cost estimates kept for the next call of the same kind."""

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from hf_speculate.schedule.acceptance import AcceptanceModel
from hf_speculate.schedule.costs import CostModel

_MAX_KINDS = 64  # kinds of calls that are kept per pair of models; each takes a few hundred numbers


class ScheduleEstimates(NamedTuple):
    """The estimates of a call; `never_paid` is set if it drafted repeatedly and drafting never paid for long."""

    acceptance: AcceptanceModel
    costs: CostModel
    never_paid: bool

    def recent(self) -> "ScheduleEstimates":
        """A copy for later calls, in which old observations weigh less."""
        return self._replace(acceptance=self.acceptance.recent(), costs=self.costs.copy())


class HistoryStore:
    """The estimates of one target's calls, by draft model (held weakly) and kind of call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_draft: WeakKeyDictionary[object, dict[Hashable, ScheduleEstimates]] = WeakKeyDictionary()

    def get(self, draft: object | None, kind: Hashable) -> ScheduleEstimates | None:
        """A copy of the estimates of the last call of a kind; None if there was none."""
        with self._lock:
            estimates = self._by_draft.get(self if draft is None else draft, {}).get(kind)
            return estimates and estimates.recent()

    def put(self, draft: object | None, kind: Hashable, estimates: ScheduleEstimates) -> None:
        """Keep a copy of a call's estimates; the kind that was used longest ago is dropped past 64 kinds."""
        with self._lock:
            kinds = self._by_draft.setdefault(self if draft is None else draft, {})
            kinds.pop(kind, None)  # the newest kind comes last
            kinds[kind] = estimates.recent()
            if len(kinds) > _MAX_KINDS:
                del kinds[next(iter(kinds))]


@dataclass(frozen=True)
class ScheduleHistory:
    """The part of a `HistoryStore` that one kind of call reads and writes."""

    store: HistoryStore
    draft: object | None  # None if no model drafts
    kind: Hashable  # what a round's seconds depend on besides rows and K: the cache, the sequence length, K_max

    def recall(self) -> ScheduleEstimates | None:
        return self.store.get(self.draft, self.kind)

    def remember(self, estimates: ScheduleEstimates) -> None:
        self.store.put(self.draft, self.kind, estimates)
