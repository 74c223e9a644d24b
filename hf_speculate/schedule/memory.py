"""Keeps what rounds took and brought for the next call of the same kind, so that short calls need not learn it anew."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from hf_speculate.schedule.acceptance import AcceptanceModel
from hf_speculate.schedule.costs import CostModel

_MAX_KINDS = 64  # of calls that are remembered of one model; each is a few hundred numbers


class Learnt(NamedTuple):
    """What a call learnt."""

    acceptance: AcceptanceModel
    costs: CostModel


_lock = threading.Lock()
# By model, what each kind of call learnt, the one that ended last at the end; they go with the model.
_known: "WeakKeyDictionary[object, OrderedDict[Hashable, Learnt]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class RoundMemory:
    """What is known of calls of one kind.

    Args:
        target: the model that is sped up; held weakly.
        kind: all else that a round's seconds depend on but rows and K: the draft, the cache, the text's length.
    """

    target: object
    kind: Hashable

    def recall(self) -> Learnt | None:
        """A copy of what the call that ended last had learnt; None where there was none."""
        with _lock:
            learnt = _known.get(self.target, OrderedDict()).get(self.kind)
        return learnt and Learnt(learnt.acceptance.recent(), learnt.costs.recent())  # what lies here never changes

    def remember(self, learnt: Learnt) -> None:
        """Keep what a call learnt; it must learn no more."""
        with _lock:
            kinds = _known.setdefault(self.target, OrderedDict())
            kinds[self.kind] = learnt
            kinds.move_to_end(self.kind)
            if len(kinds) > _MAX_KINDS:
                kinds.popitem(last=False)
