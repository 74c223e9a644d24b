"""Memory of a schedule: what the calls of one type leave for later calls with the same target."""

import threading
from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from torch import nn

from hf_speculate.config import DEFAULT_MAX_ASSISTANT_TOKENS
from hf_speculate.model_state import model_state
from hf_speculate.schedule.acceptance import Acceptance
from hf_speculate.schedule.base import DraftPrior
from hf_speculate.schedule.costs import Costs

_MAX_CALL_TYPES = 64  # kept per draft source; each takes a few hundred numbers
FIRST_WAIT = 4  # plain steps before the first trial


class ScheduleMemory:
    """Costs, acceptance and the account of all calls of one type; threads may share it.

    Args:
        prior: costs of the draft source before any round.
        max_draft_tokens: K_max, >= 1.
        sizes: see `Costs`.
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
        self.account = 0.0  # plain steps that drafting has gained so far, and its income
        self.pace = 1.0  # plain steps replaced in the seconds of one, lately
        self.wait = FIRST_WAIT  # plain steps between trials
        self.num_plain = FIRST_WAIT  # plain steps since the last trial
        self.missed_s: dict[tuple[int, int], float] = {}
        """Seconds that sizes would have saved that are not compiled yet, by B and K."""


class MemoryStore:
    """Memories of one target's calls, by drafter (held weakly) and type of call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_draft: WeakKeyDictionary[object, dict[Hashable, ScheduleMemory]] = WeakKeyDictionary()

    @classmethod
    def of(cls, model: nn.Module) -> "MemoryStore":
        """Return the memories of a target."""
        return model_state(model).get(cls, cls)

    def get(self, draft: object | None, call_type: Hashable, make: Callable[[], ScheduleMemory]) -> ScheduleMemory:
        """Return the memory of a type of call, made if it is new.

        Beyond 64 types of calls with a drafter, the one that was used longest ago is dropped.

        Args:
            draft: the drafter, held weakly. None if no object stays for the source.
            call_type: what a round's seconds depend on besides rows and K, such as the cache.
            make: makes a new memory.
        """
        with self._lock:
            by_type = self._by_draft.setdefault(self if draft is None else draft, {})
            memory = by_type.pop(call_type, None)
            by_type[call_type] = memory = make() if memory is None else memory  # newest last
            if len(by_type) > _MAX_CALL_TYPES:
                del by_type[next(iter(by_type))]
            return memory
