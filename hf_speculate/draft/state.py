"""Keeps a draft model's key-value states from one call to the next."""

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.types import KVState


class DraftSource(NamedTuple):
    """Whose states they are; of use to a draft of which all of this is the same."""

    parts: tuple[weakref.ref[Any], ...]  # the model's innermost modules
    device: torch.device
    dtype: torch.dtype
    adapters: tuple[Any, ...]  # by layer that PEFT adapts: those in use, whether they are, and those merged
    draft_ids: Tensor | None  # [V] int64, by target id, what the draft is fed for it; None: the same id

    def serves(self, other: "DraftSource") -> bool:
        """Whether the states would be the other's too."""
        if self[:4] != other[:4]:
            return False
        if self.draft_ids is None or other.draft_ids is None:
            return self.draft_ids is other.draft_ids
        return torch.equal(self.draft_ids, other.draft_ids)


class HeldDraft(NamedTuple):
    """What a draft model has read."""

    source: DraftSource
    texts: list[list[int]]  # [B] the tokens of each row, without padding
    states: list[KVState]  # by layer, each [B, H, N, D] from every row's first token on; N is the longest row


class DraftState:
    """What the draft model of earlier calls has read: `generate(..., assistant_model=draft, draft_state=state)`.

    Passed to the turns of a chat, it spares the draft model what it has read already: each row reads what follows the
    longest beginning that its prompt shares with the text before. Texts and drafts are the same with it and without.
    With another draft model or adapter, number of rows, device or dtype, or a prompt that begins otherwise, it starts
    anew. It holds one call's states at a time, and nothing after a call that failed. Threads may share it; calls that
    run at the same time find it empty. Call `reset()` after the draft's weights were changed in place.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: HeldDraft | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "DraftState":
        """Itself: a `GenerationConfig` is copied for every call, and what a call leaves is for the next one."""
        return self

    @property
    def num_bytes(self) -> int:
        """Memory that the states take."""
        with self._lock:
            states = [] if self._held is None else self._held.states
            return sum(part.numel() * part.element_size() for state in states for part in state)

    @property
    def num_tokens(self) -> int:
        """Tokens that the states are of, all rows together."""
        with self._lock:
            return 0 if self._held is None else sum(map(len, self._held.texts))

    def reset(self) -> None:
        """Forget everything."""
        self.take()

    def take(self) -> HeldDraft | None:
        """Hand over what is held, which leaves nothing; for a call that begins."""
        with self._lock:
            held, self._held = self._held, None
            return held

    def put(self, held: HeldDraft) -> None:
        """Hold what a call leaves."""
        with self._lock:
            self._held = held
