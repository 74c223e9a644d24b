"""A ragged cache layer: keys and values in a growing buffer, in which each row writes at its own end."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_speculate.cache.lookahead import Lookahead
from hf_speculate.transfers import upload
from hf_speculate.types import KVState

# A buffer grows by this many tokens, or by a twentieth of its tokens if that is more: a long cache takes at most 5 %
# more memory than its tokens, and is copied once in as many tokens, each of which reads all of it.
MIN_STEP = 64
ROOM_SHARE = 20
# A window layer keeps this many columns more than its window, for rows that are rolled back past where they began.
WINDOW_SLACK = 192
# Columns between the capacities of large buffers on a GPU; a Llama of 8 billion parameters takes 512 MiB for a row's.
EVEN_UNIT = 4096


class RaggedLayer(CacheLayerMixin):
    """A layer of a transformers `Cache` over one growing buffer.

    `keys` and `values` are [B, H, capacity, D]; their first entry is column `base`, which is 0 unless the layer has a
    window, of that many tokens with the query itself. Entries that no row has written are 0: they cannot be NaN.
    """

    is_croppable = True

    def __init__(self, lookahead: Lookahead, window: int | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.lookahead, self.layout = lookahead, lookahead.layout
        self.window = window
        self.is_sliding = window is not None
        self.base = 0
        # the buffers with the slots of rows that have left, behind the others; None if no row has left
        self._with_free: KVState | None = None

    @property
    def buffers(self) -> KVState:
        if self.keys is None or self.values is None:
            raise RuntimeError("a layer's buffers must have been made, got none; update it first")
        return KVState(self.keys, self.values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make buffers for states [B, H, Q, D] like these: of the fixed capacity, or without columns."""
        capacity = self.layout.capacity or 0
        self.take(KVState(_zeros(key_states, capacity), _zeros(value_states, capacity)))

    def take(self, buffers: KVState) -> None:
        """Use these buffers, filled with zeros."""
        self.keys, self.values = buffers
        self.dtype, self.device = buffers.keys.dtype, buffers.keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the coming tokens' states [B, H, Q, D]; the states [B, H, T, D] that they attend to, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        lookahead, num_query = self.lookahead, self.lookahead.num_query
        window = self.window if self.layout.capacity is None else None
        if window is not None and not lookahead.num_columns and num_query > window + WINDOW_SLACK:
            first = num_query - window - WINDOW_SLACK
            self.load(key_states[:, :, first:], value_states[:, :, first:], first)
            return key_states, value_states  # all of a prompt attends, its end is kept
        first, end = lookahead.first_seen(self.window), lookahead.end
        if end - self.base > self.buffers.keys.shape[2]:  # what no query will look at any more may go
            keep_from = self.base if self.window is None else max(self.base, first - WINDOW_SLACK)
            self._grow(keep_from, end, lookahead.num_columns)
        keys, values = self.buffers
        self._write(keys, key_states)
        self._write(values, value_states)
        seen = slice(first - self.base, end - self.base)
        return keys[:, :, seen], values[:, :, seen]

    def load(self, keys: Tensor, values: Tensor, base: int) -> None:
        """Hold copies of states [B, H, N, D] from column `base` on, with room for more."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        end = base + keys.shape[2]
        if self.layout.capacity is None:
            self.base = base
            self._grow(base, end, num_columns=0)
        columns = slice(base - self.base, end - self.base)
        for buffer, states in zip(self.buffers, (keys, values), strict=True):
            buffer[:, :, columns] = states

    def select(self, indices: Sequence[int], index: Tensor, num_dropped: int) -> None:
        """Keep rows, in place until fewer than half are left, without the first `num_dropped` columns of each."""
        if not self.is_initialized:
            return
        buffers = self._with_free or self.buffers
        is_ascending = all(before < after for before, after in pairwise(indices))
        if num_dropped or not is_ascending or 2 * len(indices) < buffers[0].shape[0]:
            surplus = max(num_dropped - self.base, 0)
            self.base = max(self.base - num_dropped, 0)
            there = index.to(self.device)
            self.keys, self.values = (buffer[:, :, surplus:].index_select(0, there) for buffer in self.buffers)
            self._with_free = None
            return
        with torch.inference_mode(buffers[0].is_inference()):
            for slot, row in enumerate(indices):
                if slot < row:
                    for buffer in buffers:
                        buffer[slot] = buffer[row]  # all columns, as any may be NaN
        self._use(buffers, len(indices))

    def join(self, other: "RaggedLayer") -> None:
        """Add the rows of `other` behind these, before the columns are joined; in the slots of rows that have left."""
        if not self.is_initialized or not other.is_initialized:
            return  # a layer that reads the states of another one
        num_rows, num_joining = self.buffers[0].shape[0], other.buffers[0].shape[0]
        num_columns, num_joining_columns = self.layout.num_columns - self.base, other.layout.num_columns - other.base
        buffers, base = self._with_free or self.buffers, min(self.base, other.base)
        has_room = num_rows + num_joining <= buffers[0].shape[0] and num_joining_columns <= buffers[0].shape[2]
        if not has_room or self.base != other.base:
            capacity = self._roomy(max(self.layout.num_columns, other.layout.num_columns) - base, base)
            buffers = KVState(*(_zeros(states, capacity, num_rows + num_joining) for states in self.buffers))
            for buffer, states in zip(buffers, self.buffers, strict=True):
                start = self.base - base
                buffer[:num_rows, :, start : start + num_columns] = states[:, :, :num_columns]
            self.base = base
        with torch.inference_mode(buffers[0].is_inference()):
            for buffer, states in zip(buffers, other.buffers, strict=True):
                start, new_rows = other.base - base, buffer[num_rows : num_rows + num_joining]
                new_rows[:, :, start : start + num_joining_columns] = states[:, :, :num_joining_columns]
                new_rows[:, :, start + num_joining_columns :] = 0
        self._use(buffers, num_rows + num_joining)

    def clear_behind(self, lens: Sequence[int]) -> None:
        """Overwrite the columns from each row's end on, `lens` [B], with zeros."""
        if not self.is_initialized:
            return
        first, capacity = max(min(lens) - self.base, 0), self.buffers.keys.shape[2]
        columns = torch.arange(self.base + first, self.base + capacity, device=self.device)
        is_behind = (columns >= upload(lens, columns.device)[:, None])[:, None, :, None]  # [B, 1, C, 1]
        for buffer in self.buffers:
            with torch.inference_mode(buffer.is_inference()):
                buffer[:, :, first:].masked_fill_(is_behind, 0)

    def _use(self, buffers: KVState, num_rows: int) -> None:
        """Hold the first rows of these buffers; the others are free."""
        self.keys, self.values = (buffer[:num_rows] for buffer in buffers)
        self._with_free = buffers

    def release(self) -> None:
        """Let go of the buffers, whose states somebody else holds now."""
        self.keys = self.values = self._with_free = None
        self.is_initialized = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that `query_length` coming tokens attend to, and the first of them; for rows of one length."""
        first = self.lookahead.first_seen(self.window)
        return self.layout.num_columns + query_length - first, first

    def get_seq_length(self) -> int:
        return self.layout.num_columns if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1  # no bound: the buffer grows

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        if self.lookahead.is_even:
            start = self.lookahead.num_columns - self.base
            buffer[:, :, start : start + self.lookahead.num_query] = states
            return
        slots = self.lookahead.slot_mapping(buffer.shape[1], buffer.shape[2], self.base, buffer.device)
        buffer.view(-1, buffer.shape[3]).index_copy_(0, slots, states.reshape(-1, states.shape[3]))

    def _roomy(self, num_columns: int, first: int) -> int:
        """Columns of a buffer that is to hold `num_columns` from column `first` on."""
        if self.device.type == "cuda":
            return even_capacity(num_columns)
        capacity = num_columns + max(MIN_STEP, num_columns // ROOM_SHARE)
        if self.layout.max_columns is not None:
            capacity = max(min(capacity, self.layout.max_columns - first), num_columns)
        return capacity

    def _grow(self, keep_from: int, end: int, num_columns: int) -> None:
        """Move the columns `keep_from` .. `num_columns` to buffers with room for more than up to `end`."""
        capacity = self._roomy(end - keep_from, keep_from)
        kept = slice(keep_from - self.base, max(num_columns, keep_from) - self.base)
        keys, values = self.buffers
        self._with_free = None
        self.keys = _moved(keys, kept, capacity)
        del keys  # before values are held twice
        self.values = _moved(values, kept, capacity)
        self.base = keep_from


def even_capacity(num_columns: int) -> int:
    """The next power of two, or multiple of 4,096 above that: kernels and graphs of few strides serve later calls."""
    if num_columns > EVEN_UNIT:
        return -(-num_columns // EVEN_UNIT) * EVEN_UNIT
    return max(1 << (num_columns - 1).bit_length(), MIN_STEP)


def _zeros(states: Tensor, num_columns: int, num_rows: int | None = None) -> Tensor:
    """A buffer [B, H, num_columns, D] for states [B, H, Q, D], or for another number of rows."""
    return states.new_zeros(num_rows or states.shape[0], states.shape[1], num_columns, states.shape[3])


def _moved(buffer: Tensor, columns: slice, capacity: int) -> Tensor:
    """A new buffer that begins with a range of columns of `buffer`."""
    larger = _zeros(buffer, capacity)
    larger[:, :, : columns.stop - columns.start] = buffer[:, :, columns]
    return larger
