"""Key-value states of a draft head, appended at each row's own end.

Dropping states does not copy anything.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache

from hf_speculate.cache.masks import additive
from hf_speculate.cache.pooled_buffers import BufferShape, Pool, PooledBuffers
from hf_speculate.rows.per_row import PerRow
from hf_speculate.rows.row_lens import ArangeCache, RowCounts, RowLens
from hf_speculate.types import KVState

Buffers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [B, heads, capacity, D] by layer, added at the first write to a layer."""

_GROWTH = 2  # growth factor of buffers; bounds the time spent on copying
_ALIGNMENT = 8  # each read has a multiple of this many columns, for vector loads on GPUs


class LayerMask(NamedTuple):
    """The attention pattern of a layer."""

    window: int | None = None  # number of tokens a query sees, including itself; None if unlimited
    first: int = 0  # first column with a token of this layer
    is_causal: bool = True  # whether later tokens of the same forward are hidden


@dataclass
class CacheView:
    """A view of a `RowCache` for one forward.

    It holds the columns to write to and the columns to attend to.
    """

    buffers: Buffers
    capacity: int  # number of columns in the buffers
    row_ids: Tensor  # [B, 1] int64
    columns: Tensor  # [B or 1, N] int64, columns to write to
    width: int  # number of columns to attend to
    layer_masks: Sequence[LayerMask]
    dtype: torch.dtype  # dtype of the masks
    is_bare: bool = False  # whether every token sees all columns and no mask is needed
    masks: dict[LayerMask, Tensor] = field(default_factory=dict)  # additive masks, see `mask`

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store states [B, heads, N, D]; return views of the columns to attend to."""
        if layer not in self.buffers:
            self.buffers[layer] = self._zeros(keys), self._zeros(values)
        buffers = self.buffers[layer]
        for buffer, states in zip(buffers, (keys, values), strict=True):
            buffer[self.row_ids, :, self.columns] = states.transpose(1, 2)  # [B, N, heads, D]
        return buffers[0][:, :, : self.width], buffers[1][:, :, : self.width]

    def mask(self, layer: int) -> Tensor | None:
        """Return the additive mask [B or 1, 1, N, width]; None if every column is visible."""
        key = self.layer_masks[layer]
        if self.is_bare and key.first == 0 and (key.window is None or key.window >= self.width):
            return None
        if key not in self.masks:
            self.masks[key] = additive(self._hidden(*key), self.dtype)
        return self.masks[key]

    def _hidden(self, window: int | None, first: int, is_causal: bool) -> Tensor:
        seen = torch.arange(self.width, device=self.columns.device)  # [T]
        at = self.columns[:, :, None]
        hidden = seen > (at if is_causal else at[:, -1:].expand_as(at))  # [B, N, T]
        if window is not None:
            hidden = hidden | (seen <= at - window)
            if not is_causal:
                hidden = hidden | (seen >= at + window)
        if first:  # Tokens before it see themselves: their output is unused but must be finite.
            hidden = hidden | ((seen < first) & (seen != at))
        return hidden

    def _zeros(self, states: Tensor) -> Tensor:  # masked states must be finite
        return states.new_zeros(*states.shape[:2], self.capacity, states.shape[3])


class RowCache(PerRow):
    """Keys and values of B rows, by layer.

    A row's next token is written at the row's end. Masks hide the columns after the end.
    """

    TENSORS = ("buffers",)
    PARTS = ("row_lens",)

    def __init__(self, layer_masks: Sequence[LayerMask], batch_size: int, weight: Tensor):
        self.row_lens = RowLens([0] * batch_size, ArangeCache(weight.device))
        self.buffers: Buffers = {}
        self.capacity = 0
        self.graphs: dict[Hashable, Any] | None = None  # see `take_from`; None outside a pool
        self._pool: Pool | None = None
        self._layer_masks, self._dtype = layer_masks, weight.dtype
        self._row_ids = torch.arange(batch_size, device=weight.device)[:, None]  # [B, 1]

    def view(self, num_tokens: int, offset: int = 0) -> CacheView:
        """Reserve N columns at each row's end plus `offset`; return the view for a forward.

        `offset` counts columns written by earlier forwards of the same round.
        """
        longest = max(self.row_lens.on_host, default=0) + offset + num_tokens
        aligned = -(-longest // _ALIGNMENT) * _ALIGNMENT
        is_bare = num_tokens == 1 and self.row_lens.is_even
        self.reserve(aligned)
        columns, width = (
            self.row_lens.positions(num_tokens, offset),
            longest if is_bare else aligned,
        )
        layer_masks, dtype = self._layer_masks, self._dtype
        return CacheView(
            self.buffers, self.capacity, self._row_ids, columns, width, layer_masks, dtype, is_bare
        )

    def advance(self, counts: Sequence[int], on_device: Tensor | None = None) -> None:
        """Append the first `counts` [B] of the tokens in the last write.

        `on_device` holds the counts as [B] int64; None if they are only on the host.
        """
        self.row_lens.add_counts(RowCounts(counts, on_device))

    def join(self, other: "RowCache") -> None:
        """Append the rows of `other`; an unused cache has no buffers yet."""
        capacity = max(self.capacity, other.capacity)
        self._grow_to(capacity)
        other._grow_to(capacity)
        fill_absent(
            self.buffers, other.buffers, len(self.row_lens.on_host), len(other.row_lens.on_host)
        )
        super().join(other)

    def take_from(self, pool: Pool, capacity: int) -> None:
        """Use the buffers of a pool, with the graphs captured over them; `release` returns them.

        The cache must be empty. If the pool has no buffers of this shape, the first write makes
        them. If rows move or the buffers grow, the graphs are dropped.
        """
        self._pool, self.graphs, self.capacity = pool, {}, capacity
        pooled = pool.take(self._shape, len(self._layer_masks))
        if pooled is not None:
            self.buffers, self.graphs = dict(enumerate(pooled.layers)), pooled.graphs

    def release(self) -> None:
        """Return the buffers to their pool. The cache must not be used afterwards."""
        pool, graphs, layers = self._pool, self.graphs, sorted(self.buffers)
        self._pool = self.graphs = None
        if pool is None or graphs is None or len(layers) < len(self._layer_masks):
            return
        states = [KVState(*self.buffers.pop(layer)) for layer in layers]
        pool.give_back(self._shape, PooledBuffers(states, graphs))

    @property
    def _shape(self) -> BufferShape:
        num_rows, device = len(self.row_lens.on_host), self._row_ids.device
        return BufferShape(num_rows, self.capacity, self._dtype, device)

    def forget(self) -> None:
        self.graphs = None
        num_rows = len(self.row_lens.on_host)
        if num_rows > len(self._row_ids):
            self._row_ids = torch.arange(num_rows, device=self._row_ids.device)[:, None]
        self._row_ids = self._row_ids[:num_rows]

    def reserve(self, num_columns: int) -> None:
        """Grow the buffers to at least `num_columns` columns."""
        if num_columns > self.capacity:
            self._grow_to(max(num_columns, _GROWTH * self.capacity))

    def _grow_to(self, capacity: int) -> None:
        padding, self.graphs = (0, 0, 0, capacity - self.capacity), None
        self.capacity = capacity
        self.buffers = {
            layer: (pad(keys, padding), pad(values, padding))
            for layer, (keys, values) in self.buffers.items()
        }


def fill_absent(
    mine: dict[int, Any], theirs: dict[int, Any], num_mine: int, num_theirs: int
) -> None:
    """Add zeros [B, ...] to each dictionary for tensors found only in the other dictionary."""
    for tensors, others, num_rows in ((mine, theirs, num_mine), (theirs, mine, num_theirs)):
        for key in others.keys() - tensors.keys():
            tensors[key] = tree_map(
                lambda tensor, num=num_rows: tensor.new_zeros(num, *tensor.shape[1:]), others[key]
            )


class TransformersCache(Cache):
    """A transformers `Cache` over a `RowCache`.

    It is used for one forward.
    """

    def __init__(self, view: CacheView):
        super().__init__(layers=[])
        self._view = view

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._view.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns to attend to, since rows have different lengths."""
        return self._view.width
