"""Schedule memory: estimates kept for later calls of the same type with the same target."""

import threading
from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from torch import nn

from hf_speculate.config import DEFAULT_MAX_ASSISTANT_TOKENS
from hf_speculate.model_state import model_state
from hf_speculate.schedule.acceptance import Acceptance
from hf_speculate.schedule.base import DraftPrior
from hf_speculate.schedule.costs import Costs

_MAX_CALL_TYPES = 64  # maximum per draft source; each type takes a few hundred numbers
FIRST_WAIT = 4  # number of plain steps before the first trial


class ScheduleMemory:
    """Costs, acceptance rates and account for a call type.

    Threads may share the memory; the schedule holds `lock` while it reads or writes.

    Args:
        prior: Prior costs of the draft source before any round.
        max_draft_tokens: K_max, >= 1.
        sizes: See `Costs`.
        compiles_sizes: Whether the first round of each size takes long, because it is compiled or
            captured.
    """

    def __init__(
        self,
        prior: DraftPrior | None = None,
        max_draft_tokens: int = DEFAULT_MAX_ASSISTANT_TOKENS,
        sizes: tuple[int, ...] | None = None,
        *,
        compiles_sizes: bool = True,
    ) -> None:
        self.lock = threading.Lock()
        self.compiles_sizes = sizes is not None and compiles_sizes
        self.costs = Costs(prior or DraftPrior(), max_draft_tokens, sizes)
        self.acceptance = Acceptance(max_draft_tokens)
        # balance of drafting in plain steps: past gains plus the allowed share of loss
        self.account = 0.0
        self.pace = 1.0  # recent number of plain steps replaced in the time of one plain step
        self.wait = FIRST_WAIT  # number of plain steps between trials
        self.num_plain = FIRST_WAIT  # number of plain steps since the last trial
        self.missed_s: dict[tuple[int, int], float] = {}
        """Seconds of savings missed because a size is not compiled yet, by B and K."""


class MemoryStore:
    """Schedule memories for the calls of one target.

    They are stored by drafter, which is held weakly, and by call type.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_draft: WeakKeyDictionary[object, dict[Hashable, ScheduleMemory]] = (
            WeakKeyDictionary()
        )

    @classmethod
    def of(cls, model: nn.Module) -> "MemoryStore":
        """Return the memory store of a target."""
        return model_state(model).get(cls, cls)

    def get(
        self, draft: object | None, call_type: Hashable, make: Callable[[], ScheduleMemory]
    ) -> ScheduleMemory:
        """Return the memory for a call type, which is made on first use.

        If a drafter has more than 64 call types, the least recently used type is dropped.

        Args:
            draft: The drafter, held weakly. None if the source keeps no object between calls.
            call_type: Key for influences on a round's duration other than rows and K, such as the
                cache.
            make: Function that makes a new memory.
        """
        with self._lock:
            by_type = self._by_draft.setdefault(self if draft is None else draft, {})
            memory = by_type.pop(call_type, None)
            by_type[call_type] = memory = make() if memory is None else memory  # newest last
            if len(by_type) > _MAX_CALL_TYPES:
                del by_type[next(iter(by_type))]
            return memory
