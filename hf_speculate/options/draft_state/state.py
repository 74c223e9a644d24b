"""`DraftState`: a draft model's KV states between `generate` calls."""

import threading
import weakref
from typing import Any, NamedTuple

import torch

from hf_speculate.types import KVState


class DraftCacheKey(NamedTuple):
    """The key of a saved draft cache.

    It holds everything besides tokens that cached states depend on. A draft model with an equal key
    can use the states.
    """

    parts: tuple[weakref.ref[Any], ...]  # the model's innermost modules
    device: torch.device
    dtype: torch.dtype
    adapters: tuple[Any, ...]  # per PEFT layer: active adapters, whether disabled, merged adapters
    table: object  # maps target ids to draft ids; None if ids are equal


class SavedDraftCache(NamedTuple):
    """A draft model's KV states, saved at the end of a call."""

    key: DraftCacheKey
    token_ids: list[list[int]]  # [B] the tokens of each row, without padding
    # one per layer, [B, H, N, D] from each row's first token on; N is the length of the longest row
    kv_states: list[KVState]


class DraftState:
    """A draft model's KV states between calls.

    Use it as `generate(..., assistant_model=draft, draft_state=state)`. Pass the same object to all
    turns of a chat. The draft model then skips the longest prefix common to each row's prompt and
    the last call's text. Texts and drafts do not change.

    The states are dropped if the draft model, its adapters, the number of rows, the device or the
    dtype differ, or if there is no common prefix. The object holds the states of one call, and none
    after a failed call. Threads may share it; simultaneous calls find it empty. Call `reset()`
    after changing the draft's weights in place.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saved: SavedDraftCache | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "DraftState":
        """Return the object itself, since `generate` copies a `GenerationConfig` in every call."""
        return self

    @property
    def num_bytes(self) -> int:
        """Size of the KV states in bytes."""
        with self._lock:
            states = [] if self._saved is None else self._saved.kv_states
            return sum(
                tensor.numel() * tensor.element_size() for state in states for tensor in state
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens with KV states, summed over rows."""
        with self._lock:
            return 0 if self._saved is None else sum(map(len, self._saved.token_ids))

    def reset(self) -> None:
        """Drop all states."""
        self.take()

    def take(self) -> SavedDraftCache | None:
        """Return the saved cache, or None, and empty the state."""
        with self._lock:
            saved, self._saved = self._saved, None
            return saved

    def put(self, saved: SavedDraftCache) -> None:
        """Save the cache at the end of a call."""
        with self._lock:
            self._saved = saved
