"""Memory of a schedule: estimates kept for later calls of one type with the same target."""

import threading
from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from torch import nn

from hf_speculate.config import DEFAULT_MAX_ASSISTANT_TOKENS
from hf_speculate.model_state import model_state
from hf_speculate.schedule.acceptance import Acceptance
from hf_speculate.schedule.base import DraftPrior
from hf_speculate.schedule.costs import Costs

_MAX_CALL_TYPES = 64  # maximum per draft source; each takes a few hundred numbers
FIRST_WAIT = 4  # plain steps before the first trial


class ScheduleMemory:
    """Costs, acceptance and account of a call type.

    Threads may share it; the schedule holds `lock` while it reads or writes.

    Args:
        prior: Costs of the draft source before any round.
        max_draft_tokens: K_max, >= 1.
        sizes: See `Costs`.
    """

    def __init__(
        self,
        prior: DraftPrior | None = None,
        max_draft_tokens: int = DEFAULT_MAX_ASSISTANT_TOKENS,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.costs = Costs(prior or DraftPrior(), max_draft_tokens, sizes)
        self.acceptance = Acceptance(max_draft_tokens)
        # balance of drafting in plain steps: past gains, and the allowed share of loss
        self.account = 0.0
        self.pace = 1.0  # recent number of plain steps replaced in the seconds of one
        self.wait = FIRST_WAIT  # plain steps between trials
        self.num_plain = FIRST_WAIT  # plain steps since the last trial
        self.missed_s: dict[tuple[int, int], float] = {}
        """Savings missed in seconds, because a size is not compiled yet; by B and K."""


class MemoryStore:
    """Memories of one target's calls.

    The keys are the drafter, held weakly, and the call type.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_draft: WeakKeyDictionary[object, dict[Hashable, ScheduleMemory]] = (
            WeakKeyDictionary()
        )

    @classmethod
    def of(cls, model: nn.Module) -> "MemoryStore":
        """Return the memories of a target."""
        return model_state(model).get(cls, cls)

    def get(
        self, draft: object | None, call_type: Hashable, make: Callable[[], ScheduleMemory]
    ) -> ScheduleMemory:
        """Return the memory of a call type; make it on first use.

        Beyond 64 call types with a drafter, the least recently used one is dropped.

        Args:
            draft: The drafter, held weakly. None if the source keeps no object between calls.
            call_type: Key of further influences on a round's seconds besides rows and K, such as
                the cache.
            make: Makes a new memory.
        """
        with self._lock:
            by_type = self._by_draft.setdefault(self if draft is None else draft, {})
            memory = by_type.pop(call_type, None)
            by_type[call_type] = memory = make() if memory is None else memory  # newest last
            if len(by_type) > _MAX_CALL_TYPES:
                del by_type[next(iter(by_type))]
            return memory
