"""Ragged cache layer: keys and values in a growing buffer, with each row written at its own end."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_speculate.cache.lookahead import Lookahead
from hf_speculate.transfers import upload
from hf_speculate.types import KVState

# A buffer grows by 64 tokens or by a twentieth of its tokens, whichever is more. A long cache thus
# takes at most 5 % more memory than its tokens need. The buffer is copied once per growth, whereas
# each token in between reads all of it.
MIN_STEP = 64
ROOM_SHARE = 20
# Columns that a window layer keeps behind its window, for rollbacks past the start of a row.
WINDOW_SLACK = 192
# Step between the capacities of large buffers on a GPU, in columns. One step takes 512 MiB per row
# in a Llama with 8 billion parameters.
EVEN_UNIT = 4096


class RaggedLayer(CacheLayerMixin):
    """Cache layer over a growing buffer.

    `keys` and `values` are [B, H, capacity, D]. Their first entry is column `base`, which is 0 for
    a layer without a window. The window counts tokens, including the query. Unwritten entries are
    0, never NaN.
    """

    is_croppable = True

    def __init__(self, lookahead: Lookahead, window: int | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.lookahead, self.layout = lookahead, lookahead.layout
        self.window = window
        self.is_sliding = window is not None
        self.base = 0
        # Buffers that include the free slots of rows that have left, after the rows in use; None if
        # no row has left.
        self._with_free: KVState | None = None

    @property
    def buffers(self) -> KVState:
        if self.keys is None or self.values is None:
            raise RuntimeError("a layer's buffers must have been made, got none; update it first")
        return KVState(self.keys, self.values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make buffers for states [B, H, Q, D] with the fixed capacity, or without columns."""
        capacity = self.layout.capacity or 0
        self.take(KVState(_zeros(key_states, capacity), _zeros(value_states, capacity)))

    def take(self, buffers: KVState) -> None:
        """Use the given buffers, which are filled with zeros."""
        self.keys, self.values = buffers
        self.dtype, self.device = buffers.keys.dtype, buffers.keys.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states [B, H, Q, D] of the next tokens.

        Return the views [B, H, T, D] that these tokens attend to.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        lookahead, num_query = self.lookahead, self.lookahead.num_query
        window = self.window if self.layout.capacity is None else None
        if window is not None and not lookahead.num_columns and num_query > window + WINDOW_SLACK:
            first = num_query - window - WINDOW_SLACK
            self.load(key_states[:, :, first:], value_states[:, :, first:], first)
            return key_states, value_states  # attention reads the whole prompt, the cache its end
        first, end = lookahead.first_seen(self.window), lookahead.end
        if end - self.base > self.buffers.keys.shape[2]:  # columns behind the window can be dropped
            keep_from = self.base if self.window is None else max(self.base, first - WINDOW_SLACK)
            self._grow(keep_from, end, lookahead.num_columns)
        keys, values = self.buffers
        self._write(keys, key_states)
        self._write(values, value_states)
        visible = slice(first - self.base, end - self.base)
        return keys[:, :, visible], values[:, :, visible]

    def load(self, keys: Tensor, values: Tensor, base: int) -> None:
        """Copy states [B, H, N, D] to the columns from `base` on, with room for more."""
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
        """Keep the rows `indices` without their first `num_dropped` columns.

        The rows are moved in place until fewer than half of them are left.
        """
        if not self.is_initialized:
            return
        buffers = self._with_free or self.buffers
        is_ascending = all(before < after for before, after in pairwise(indices))
        if num_dropped or not is_ascending or 2 * len(indices) < buffers[0].shape[0]:
            surplus = max(num_dropped - self.base, 0)
            self.base = max(self.base - num_dropped, 0)
            index_on_device = index.to(self.device)
            self.keys, self.values = (
                buffer[:, :, surplus:].index_select(0, index_on_device) for buffer in self.buffers
            )
            self._with_free = None
            return
        with torch.inference_mode(buffers[0].is_inference()):
            for slot, row in enumerate(indices):
                if slot < row:
                    for buffer in buffers:
                        buffer[slot] = buffer[row]  # all columns, because any column may be NaN
        self._use(buffers, len(indices))

    def join(self, other: "RaggedLayer") -> None:
        """Append the rows of `other`, using free slots if there are any.

        The layouts are joined afterwards.
        """
        if not self.is_initialized or not other.is_initialized:
            return  # the layer reads the states of another layer
        num_rows, num_joining = self.buffers[0].shape[0], other.buffers[0].shape[0]
        num_columns, num_joining_columns = (
            self.layout.num_columns - self.base,
            other.layout.num_columns - other.base,
        )
        buffers, base = self._with_free or self.buffers, min(self.base, other.base)
        has_room = (
            num_rows + num_joining <= buffers[0].shape[0]
            and num_joining_columns <= buffers[0].shape[2]
        )
        if not has_room or self.base != other.base:
            capacity = self._roomy(
                max(self.layout.num_columns, other.layout.num_columns) - base, base
            )
            buffers = KVState(
                *(_zeros(states, capacity, num_rows + num_joining) for states in self.buffers)
            )
            for buffer, states in zip(buffers, self.buffers, strict=True):
                start = self.base - base
                buffer[:num_rows, :, start : start + num_columns] = states[:, :, :num_columns]
            self.base = base
        with torch.inference_mode(buffers[0].is_inference()):
            for buffer, states in zip(buffers, other.buffers, strict=True):
                start, new_rows = other.base - base, buffer[num_rows : num_rows + num_joining]
                new_rows[:, :, start : start + num_joining_columns] = states[
                    :, :, :num_joining_columns
                ]
                new_rows[:, :, start + num_joining_columns :] = 0
        self._use(buffers, num_rows + num_joining)

    def clear_behind(self, lens: Sequence[int]) -> None:
        """Zero the columns past each row's end, given the row lengths `lens` [B]."""
        if not self.is_initialized:
            return
        first, capacity = max(min(lens) - self.base, 0), self.buffers.keys.shape[2]
        columns = torch.arange(self.base + first, self.base + capacity, device=self.device)
        # [B, 1, C, 1]
        is_behind = (columns >= upload(lens, columns.device)[:, None])[:, None, :, None]
        for buffer in self.buffers:
            with torch.inference_mode(buffer.is_inference()):
                buffer[:, :, first:].masked_fill_(is_behind, 0)

    def _use(self, buffers: KVState, num_rows: int) -> None:
        """Use the first `num_rows` rows of the buffers; the remaining rows are free."""
        self.keys, self.values = (buffer[:num_rows] for buffer in buffers)
        self._with_free = buffers

    def release(self) -> None:
        """Release the buffers because another object now holds the states."""
        self.keys = self.values = self._with_free = None
        self.is_initialized = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns attention reads and the first of them, for equally long rows."""
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
        slots = self.lookahead.slot_mapping(
            buffer.shape[1], buffer.shape[2], self.base, buffer.device
        )
        buffer.view(-1, buffer.shape[3]).index_copy_(0, slots, states.reshape(-1, states.shape[3]))

    def _roomy(self, num_columns: int, first: int) -> int:
        """Return the capacity of a buffer for `num_columns` columns from column `first` on."""
        if self.device.type == "cuda":
            return even_capacity(num_columns)
        capacity = num_columns + max(MIN_STEP, num_columns // ROOM_SHARE)
        if self.layout.max_columns is not None:
            capacity = max(min(capacity, self.layout.max_columns - first), num_columns)
        return capacity

    def _grow(self, keep_from: int, end: int, num_columns: int) -> None:
        """Move the columns `keep_from` .. `num_columns` to buffers with room beyond `end`."""
        capacity = self._roomy(end - keep_from, keep_from)
        kept_columns = slice(keep_from - self.base, max(num_columns, keep_from) - self.base)
        keys, values = self.buffers
        self._with_free = None
        self.keys = _moved(keys, kept_columns, capacity)
        del keys  # frees the old keys before the values are copied
        self.values = _moved(values, kept_columns, capacity)
        self.base = keep_from


def even_capacity(num_columns: int) -> int:
    """Round up to a power of two, or to a multiple of 4,096 above 4,096.

    With few different strides, later calls can use the same kernels and graphs.
    """
    if num_columns > EVEN_UNIT:
        return -(-num_columns // EVEN_UNIT) * EVEN_UNIT
    return max(1 << (num_columns - 1).bit_length(), MIN_STEP)


def _zeros(states: Tensor, num_columns: int, num_rows: int | None = None) -> Tensor:
    """Make a zeroed buffer [B or num_rows, H, num_columns, D] for states [B, H, Q, D]."""
    return states.new_zeros(
        num_rows or states.shape[0], states.shape[1], num_columns, states.shape[3]
    )


def _moved(buffer: Tensor, columns: slice, capacity: int) -> Tensor:
    """Copy the given columns of `buffer` to the start of a new buffer with `capacity` columns."""
    larger = _zeros(buffer, capacity)
    larger[:, :, : columns.stop - columns.start] = buffer[:, :, columns]
    return larger
