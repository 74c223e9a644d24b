"""One layer's states in a buffer with room to grow, in which every row writes at its own end."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_speculate.cache.buffer_pool import LayerBuffers

# Room is made for this many tokens, or a twentieth of what is held where that is more: a long cache takes 5 % more
# memory than its tokens at most, and growing copies it once in as many tokens, each of which reads all of it.
MIN_STEP = 64
ROOM_SHARE = 20
# A window layer keeps this many columns more than its window, for rows that are rolled back past where they began.
WINDOW_SLACK = 192


class Columns:
    """Where each row ends in the buffers, and where the coming forward writes; all layers share it.

    A row's columns are its prompt's padding, then its tokens.

    Args:
        batch_size: B.
        max_columns: the longest a row can become; None: unknown.
        capacity: how many columns every buffer has from the start, so that it never grows, moves or leaves any out;
            None: buffers grow.
    """

    def __init__(self, batch_size: int, max_columns: int | None = None, capacity: int | None = None):
        self.lens = [0] * batch_size
        self.max_columns = max_columns
        self.capacity = capacity
        self.num_query = 0
        self._places: dict[Hashable, Tensor] = {}

    @property
    def is_even(self) -> bool:
        """Whether all rows end at one column."""
        return min(self.lens) == max(self.lens)

    @property
    def num_held(self) -> int:
        """Columns that some row uses."""
        return max(self.lens, default=0)

    @property
    def end(self) -> int:
        """Columns that some row uses once the coming tokens are written."""
        return self.num_held + self.num_query

    def first_seen(self, window: int | None) -> int:
        """The first column that a query of the coming forward may attend to."""
        if window is None or self.capacity is not None:
            return 0
        return max(min(self.lens) - window + 1, 0)

    def begin(self, num_query: int) -> None:
        """Announce a forward of `num_query` tokens a row."""
        self.num_query = num_query
        self._places = {}

    def places(self, num_heads: int, capacity: int, base: int, device: torch.device) -> Tensor:
        """[B * H * Q] int64: where the coming tokens go in [B * H * capacity, D], which begins at column `base`."""
        key = (num_heads, capacity, base, device)
        if key not in self._places:
            starts = torch.tensor(self.lens, device=device) - base
            tokens = starts[:, None] + torch.arange(self.num_query, device=device)  # [B, Q]
            heads = torch.arange(len(self.lens) * num_heads, device=device).view(-1, num_heads, 1) * capacity
            self._places[key] = (heads + tokens[:, None]).flatten()
        return self._places[key]


class RaggedLayer(CacheLayerMixin):
    """A layer of a transformers `Cache` over one growing buffer.

    `keys` and `values` are [B, H, capacity, D]; their first entry is column `base`, which is 0 unless the layer has a
    window. Entries that no row has written are 0, so that what a mask hides cannot be a NaN.

    Args:
        columns: shared with the other layers.
        window: how many tokens a query attends to, itself among them; None: all.
    """

    is_croppable = True

    def __init__(self, columns: Columns, window: int | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.columns = columns
        self.window = window
        self.is_sliding = window is not None
        self.base = 0

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values, once there are some."""
        if self.keys is None or self.values is None:
            raise RuntimeError("a layer's buffers must have been made, got none; update it first")
        return self.keys, self.values

    @property
    def capacity(self) -> int:
        """Columns that the buffer has room for."""
        return 0 if self.keys is None else self.keys.shape[2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make buffers for states [B, H, Q, D] like these: of the fixed capacity, or without room."""
        self.dtype, self.device = key_states.dtype, key_states.device
        room = self.columns.capacity or 0
        self.keys, self.values = _zeros(key_states, room), _zeros(value_states, room)
        self.is_initialized = True

    def take(self, buffers: LayerBuffers) -> None:
        """Use these buffers, of the fixed capacity and filled with zeros."""
        self.keys, self.values = buffers
        self.dtype, self.device = buffers.keys.dtype, buffers.keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the coming tokens' states [B, H, Q, D]; the states [B, H, T, D] that they attend to, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        columns = self.columns
        window = self.window if columns.capacity is None else None
        if window is not None and not columns.num_held and columns.num_query > window + WINDOW_SLACK:
            first = columns.num_query - window - WINDOW_SLACK
            self.load(key_states[:, :, first:], value_states[:, :, first:], first)
            return key_states, value_states  # all of a prompt attends, its end is kept
        first, end = columns.first_seen(self.window), columns.end
        self._reserve(first, end)
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
        if self.columns.capacity is None:
            self.base = base
            self._grow(base, end, num_held=0)
        held = slice(base - self.base, end - self.base)
        for buffer, states in zip(self.buffers, (keys, values), strict=True):
            buffer[:, :, held] = states

    def select(self, indices: Tensor, num_dropped: int) -> None:
        """Keep the rows `indices` [N] int64, without the first `num_dropped` columns of each."""
        if not self.is_initialized:
            return
        surplus = max(num_dropped - self.base, 0)
        self.base = max(self.base - num_dropped, 0)
        index = indices.to(self.device)
        self.keys, self.values = (buffer[:, :, surplus:].index_select(0, index) for buffer in self.buffers)

    def release(self) -> None:
        """Let go of the buffers, whose states somebody else holds now."""
        self.keys = self.values = None
        self.is_initialized = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that `query_length` coming tokens attend to, and the first of them; for rows of one length."""
        first = self.columns.first_seen(self.window)
        return self.columns.num_held + query_length - first, first

    def get_seq_length(self) -> int:
        """Columns of the longest row."""
        return self.columns.num_held if self.is_initialized else 0

    def get_max_length(self) -> int:
        """No bound: the buffer grows."""
        return -1

    def get_max_cache_shape(self) -> int:
        """As `get_max_length`, under the name of older versions of transformers."""
        return -1

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        """Put the coming tokens' states [B, H, Q, D] into `buffer`."""
        columns = self.columns
        if columns.is_even:
            start = columns.num_held - self.base
            buffer[:, :, start : start + columns.num_query] = states
            return
        places = columns.places(buffer.shape[1], buffer.shape[2], self.base, buffer.device)
        buffer.view(-1, buffer.shape[3]).index_copy_(0, places, states.reshape(-1, states.shape[3]))

    def _reserve(self, first: int, end: int) -> None:
        """Make room up to column `end`; what no query will look at any more may go."""
        if end - self.base > self.capacity:
            keep_from = self.base if self.window is None else max(self.base, first - WINDOW_SLACK)
            self._grow(keep_from, end, self.columns.num_held)

    def _grow(self, keep_from: int, end: int, num_held: int) -> None:
        """Move the columns `keep_from` .. `num_held` to buffers with room for more than up to `end`."""
        num_columns = end - keep_from
        capacity = num_columns + max(MIN_STEP, num_columns // ROOM_SHARE)
        if self.columns.max_columns is not None:
            capacity = max(min(capacity, self.columns.max_columns - keep_from), num_columns)
        held = slice(keep_from - self.base, max(num_held, keep_from) - self.base)
        keys, values = self.buffers
        self.keys = _moved(keys, held, capacity)
        del keys  # before values are held twice
        self.values = _moved(values, held, capacity)
        self.base = keep_from


def _zeros(states: Tensor, num_columns: int) -> Tensor:
    """A buffer [B, H, num_columns, D] for states [B, H, Q, D]."""
    return states.new_zeros(*states.shape[:2], num_columns, states.shape[3])


def _moved(buffer: Tensor, held: slice, capacity: int) -> Tensor:
    """A new buffer that begins with the columns `held` of `buffer`."""
    larger = _zeros(buffer, capacity)
    larger[:, :, : held.stop - held.start] = buffer[:, :, held]
    return larger
