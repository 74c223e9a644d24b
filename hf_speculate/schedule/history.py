"""Schedule history: estimates that calls of one type leave for the next one."""

import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from hf_speculate.model_state import model_state
from hf_speculate.schedule.acceptance import AcceptanceModel
from hf_speculate.schedule.budget import Budget
from hf_speculate.schedule.costs import CostModel

_MAX_CALL_TYPES = 64  # types of calls that are kept per draft source; each takes a few hundred numbers
_PATIENCE = 2  # useless calls in a row after which most calls rest
_TRUST = 3.0  # times its loss that earlier calls must have gained for a useless call to let none rest
_FADE = 0.5  # share of what earlier calls have gained that still counts after a useless one
_LONGEST_REST = 3  # the power of four whose number of calls holds one trial, at most
_TELLING = 2  # rounds that must have drafted before a call counts as useless


@dataclass(frozen=True)
class CallRecord:
    """The gain of drafting in the calls of one type so far."""

    account_s: float = 0.0  # seconds that the calls have left of their budgets, see `schedule.budget`
    gained_s: float = 0.0  # by calls in which drafting gained
    has_gained: bool = False  # in the last call that could tell
    num_useless: int = 0  # calls in a row in which drafting gained nothing
    num_vain: int = 0  # how many of these followed after so many that calls rest
    num_resting: int = 0  # calls since the last one that drafted
    num_untold: int = 0  # drafted rounds since the last call that could tell
    is_new: bool = True  # whether no call has drafted

    @property
    def rests(self) -> bool:
        """Whether the next call does not try to draft: after useless calls every 4th does, then every 16th or 64th."""
        return self.num_vain > 0 and self.num_resting < 4 ** min(self.num_vain, _LONGEST_REST) - 1

    def after(self, budget: Budget, expects_gain: bool) -> "CallRecord":
        """The record after a call; `expects_gain` says whether drafting was estimated to pay at its end."""
        account_s, loss_s = max(self.account_s + budget.left_s, 0.0), budget.loss_s
        if not budget.num_drafted:
            return replace(self, account_s=account_s, num_resting=self.num_resting + 1)
        if loss_s < 0:
            return CallRecord(account_s, self.gained_s - loss_s, has_gained=True, is_new=False)
        num_untold = self.num_untold + budget.num_drafted
        if expects_gain or (num_untold < _TELLING and not self.num_useless):  # a call that ends early cannot tell
            return replace(self, account_s=account_s, num_resting=0, num_untold=num_untold, is_new=False)
        gained_s, num_useless = _FADE * self.gained_s, self.num_useless + 1
        is_vain = num_useless >= _PATIENCE and gained_s < _TRUST * loss_s
        return CallRecord(account_s, gained_s, False, num_useless, self.num_vain + is_vain, is_new=False)


class ScheduleEstimates(NamedTuple):
    """The estimates of a call, and the records of the calls up to it."""

    acceptance: AcceptanceModel
    costs: CostModel
    records: Mapping[int, CallRecord]  # by the bit length of B: what gains for one row may not for many

    def recent(self) -> "ScheduleEstimates":
        """A copy for later calls, in which old observations weigh less."""
        return self._replace(acceptance=self.acceptance.recent(), costs=self.costs.recent())


class HistoryStore:
    """The estimates of one target's calls, by drafter (held weakly) and type of call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_draft: WeakKeyDictionary[object, dict[Hashable, ScheduleEstimates]] = WeakKeyDictionary()

    @classmethod
    def of(cls, model: nn.Module) -> "HistoryStore":
        """The estimates of a target."""
        return model_state(model).get(cls, cls)

    def get(self, draft: object | None, call_type: Hashable) -> ScheduleEstimates | None:
        """A copy of the estimates of the last call of a type; None if there was none."""
        with self._lock:
            estimates = self._by_draft.get(self if draft is None else draft, {}).get(call_type)
            return estimates and estimates.recent()

    def put(self, draft: object | None, call_type: Hashable, estimates: ScheduleEstimates) -> None:
        """Keep a copy of a call's estimates; beyond 64 types of calls, the one that was used longest ago is dropped."""
        with self._lock:
            by_type = self._by_draft.setdefault(self if draft is None else draft, {})
            by_type.pop(call_type, None)  # the newest type comes last
            by_type[call_type] = estimates.recent()
            if len(by_type) > _MAX_CALL_TYPES:
                del by_type[next(iter(by_type))]


@dataclass(frozen=True)
class ScheduleHistory:
    """The part of a `HistoryStore` that one type of call reads and writes."""

    store: HistoryStore
    draft: object | None  # held weakly; None if no object stays for the source, see `call_type`
    call_type: Hashable  # what a round's seconds depend on besides rows and K: the cache, the sequence length, K_max

    def recall(self) -> ScheduleEstimates | None:
        return self.store.get(self.draft, self.call_type)

    def remember(self, estimates: ScheduleEstimates) -> None:
        self.store.put(self.draft, self.call_type, estimates)
