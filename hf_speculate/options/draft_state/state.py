"""`DraftState`: a draft model's key-value states, kept from one `generate` call to the next."""

import threading
import weakref
from typing import Any, NamedTuple

import torch

from hf_speculate.types import KVState


class DraftCacheKey(NamedTuple):
    """The key of a saved draft cache: what its states depend on besides tokens; a draft with an equal key uses them."""

    parts: tuple[weakref.ref[Any], ...]  # the model's innermost modules
    device: torch.device
    dtype: torch.dtype
    adapters: tuple[Any, ...]  # for each layer that PEFT adapts: active ones, whether they are disabled, merged ones
    table: object  # the mapping of the target's ids to the draft's; None if the ids are the same


class SavedDraftCache(NamedTuple):
    """KV states of a draft model at the end of a call."""

    key: DraftCacheKey
    token_ids: list[list[int]]  # [B] the tokens of each row, without padding
    kv_states: list[KVState]  # one per layer, [B, H, N, D] from each row's first token on; N is the longest row


class DraftState:
    """KV states of a draft model, reused by the next call: `generate(..., assistant_model=draft, draft_state=state)`.

    Pass the same object to all turns of a chat: the draft model then processes only what follows the longest prefix
    that each row's prompt shares with the last call's text. Texts and drafts do not change. The states are dropped if
    the draft model, its adapters, the number of rows, the device or the dtype differ, or if no prefix is shared. The
    object holds the states of one call, and none after a call that failed. Threads may share it; calls that run at the
    same time find it empty. Call `reset()` after changing the draft's weights in place.
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
            return sum(part.numel() * part.element_size() for state in states for part in state)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have KV states, summed over rows."""
        with self._lock:
            return 0 if self._saved is None else sum(map(len, self._saved.token_ids))

    def reset(self) -> None:
        """Drop all states."""
        self.take()

    def take(self) -> SavedDraftCache | None:
        """Return the saved cache, or None, and leave the state empty."""
        with self._lock:
            saved, self._saved = self._saved, None
            return saved

    def put(self, saved: SavedDraftCache) -> None:
        """Save the cache of a call that ends."""
        with self._lock:
            self._saved = saved
