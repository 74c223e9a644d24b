"""Keeps what rounds took and brought for the next call of the same kind, so that short calls need not learn it anew."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from hf_speculate.schedule.acceptance import AcceptanceModel
from hf_speculate.schedule.costs import CostModel

_MAX_KINDS = 64  # of calls that are remembered of two models; each is a few hundred numbers


class Learnt(NamedTuple):
    """What a call learnt; `is_in_vain`: it asked for drafts again and again, and they never paid for long."""

    acceptance: AcceptanceModel
    costs: CostModel
    is_in_vain: bool

    def recent(self) -> "Learnt":
        """A copy of what later calls are told."""
        return self._replace(acceptance=self.acceptance.recent(), costs=self.costs.recent())


_lock = threading.Lock()
# By target and draft, what each kind of call learnt, the one that ended last at the end; they go with either model.
_known: "WeakKeyDictionary[object, WeakKeyDictionary[object, OrderedDict[Hashable, Learnt]]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class RoundMemory:
    """What is known of calls of one kind.

    Args:
        target: the model that is sped up; held weakly by what is kept.
        draft: the draft model, held weakly too; None: nothing but the target says what goes before a verification.
        kind: all else that a round's seconds depend on but rows and K: the cache, the text's length, K_max.
    """

    target: object
    draft: object | None
    kind: Hashable

    def recall(self) -> Learnt | None:
        """A copy of what the call that ended last had learnt; None where there was none."""
        with _lock:
            learnt = self._kinds().get(self.kind)
        return learnt and learnt.recent()  # what lies here never changes

    def remember(self, learnt: Learnt) -> None:
        """Keep what a call learnt."""
        learnt = learnt.recent()
        with _lock:
            kinds = self._kinds()
            kinds[self.kind] = learnt
            kinds.move_to_end(self.kind)
            if len(kinds) > _MAX_KINDS:
                kinds.popitem(last=False)

    def _kinds(self) -> OrderedDict[Hashable, Learnt]:
        drafts = _known.setdefault(self.target, WeakKeyDictionary())
        return drafts.setdefault(self.target if self.draft is None else self.draft, OrderedDict())
