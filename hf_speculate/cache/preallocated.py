"""Preallocated KV cache: every row has its own end column, and a rollback copies nothing."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from hf_speculate.cache.base import KVCache, LayerView, ShortLayer, checked_drops, gathered, leading
from hf_speculate.cache.layers import holding, layers_snapshot
from hf_speculate.cache.lookahead import Lookahead
from hf_speculate.cache.masks import hidden, marked_as_spans
from hf_speculate.cache.pooled_buffers import BufferShape, Pool, PooledBuffers
from hf_speculate.cache.ragged_layer import RaggedLayer
from hf_speculate.cache.row_layout import RowLayout
from hf_speculate.rows.per_row import RowIndices
from hf_speculate.rows.row_lens import RowLens
from hf_speculate.types import KVState

# Longer queries are prompts with rows of equal length. transformers builds their masks, or none.
MAX_MASKED_QUERY = 160


class MaskSpec(NamedTuple):
    """The attention masks that a model takes."""

    windows: tuple[int | None, ...]  # window of each layer; None if it attends to all tokens
    mask_windows: dict[
        str, int | None
    ]  # window by name of the mask in the model, which takes a single mask if there is one entry
    mask_dtype: torch.dtype  # dtype of additive masks, which is the dtype of the queries
    is_mask_per_row: bool = False  # whether each row needs a mask, even if all masks are equal

    def masks(self, make: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
        """Make the model's attention mask with `make`, a function of the window.

        `make` returns additive masks in which each query attends to a span of columns. A model with
        several masks gets a dict by name.
        """
        masks = {name: marked_as_spans(make(window)) for name, window in self.mask_windows.items()}
        return next(iter(masks.values())) if len(masks) == 1 else masks


class PreallocatedKVCache(KVCache):
    """`KVCache` over preallocated buffers with left-aligned rows.

    The next token of a row is written at the row's end. Rolling a row back reduces its length.
    Additive masks [B, 1, Q, T] hide the columns after its end, which later tokens overwrite.
    Attention reads views of the columns in use.
    """

    kind = "preallocated"

    def __init__(
        self,
        mask_spec: MaskSpec,
        batch_size: int,
        attention_mask: Tensor | None = None,  # [B, T] int64 over `kept_cache` and the prompt
        device: torch.device | str = "cpu",  # device of masks and position ids
        max_columns: int | None = None,  # maximum row length including padding; None if unknown
        kept_cache: Cache | None = None,  # user's cache with initial states, for `hand_back`
        capacity: int | None = None,  # number of columns of fixed buffers; None if buffers grow
        pool: Pool | None = None,  # pool to take fixed buffers from; `release` returns them
    ):
        pads = [0] * batch_size if attention_mask is None else attention_mask.argmax(dim=1).tolist()
        self.layout = RowLayout(pads, max_columns, capacity, device)
        self._lookahead = Lookahead(self.layout, mask_spec.mask_dtype)
        self._layers = [RaggedLayer(self._lookahead, window) for window in mask_spec.windows]
        self.cache = Cache(layers=list(self._layers))
        self.mask_spec = mask_spec
        self.device = torch.device(device)
        self._kept_cache = kept_cache
        self._holds_rejected = False
        self._pool = pool
        self._shape = BufferShape(batch_size, capacity, mask_spec.mask_dtype, self.device)
        self.graphs: dict[Hashable, Any] = {}  # graphs captured over the buffers
        pooled = None if pool is None else pool.take(self._shape, len(mask_spec.windows))
        if pooled is not None:
            self.graphs = pooled.graphs
            for layer, buffers in zip(self._layers, pooled.layers, strict=True):
                layer.take(buffers)
        if kept_cache is not None:
            self._load(kept_cache)

    @property
    def batch_size(self) -> int:
        return len(self.layout.pads)

    @property
    def num_columns(self) -> int:
        return self.layout.num_columns

    @property
    def num_real_tokens(self) -> list[int]:
        return [
            max(length - pad, 0)
            for length, pad in zip(self.layout.lens, self.layout.pads, strict=True)
        ]

    def get_kv_states(self) -> list[KVState]:
        """Copy one right-aligned `KVState` [B, H, T, D] per layer.

        For window layers, only the window is copied.
        """
        return [self._states(layer) for layer in self._layers] if self.num_columns else []

    def view(self, layer: int, window: int | None = None) -> LayerView:
        layout, buffered = self.layout, self._layers[layer]
        first = buffered.base if window is None else max(min(layout.lens) - window, buffered.base)
        columns = slice(first - buffered.base, layout.num_columns - buffered.base)
        keys, values = (buffer[:, :, columns] for buffer in buffered.buffers)
        if layout.is_even and not any(layout.pads):
            return LayerView(keys, values, None)
        positions = layout.positions(first, layout.num_columns - first)  # [B or 1, T]
        return LayerView(
            keys, values, hidden(positions[:, None], self.last_positions()[:, :, None], window)
        )

    def last_positions(self) -> Tensor:
        return self.layout.row_lens.positions(1, -1, self.layout.pads_on_device())

    def first_tokens(self, counts: Sequence[int]) -> list[KVState] | None:
        """Copy the first states; see `KVCache.first_tokens`.

        The result is None once a window layer has dropped some of them.
        """
        if not self.num_columns or any(layer.base for layer in self._layers):
            return None
        return [leading(layer.buffers, self.layout.pads, max(counts)) for layer in self._layers]

    def update(self, states: Sequence[KVState]) -> None:
        num_query = states[0].keys.shape[2] if states else 0
        self._lookahead.begin(num_query)
        for index, state in enumerate(states):
            self.cache.update(state.keys, state.values, index)
        self.advance(num_query)

    def mask(self, num_query: int) -> Tensor | dict[str, Tensor] | None:
        """Start a forward of `num_query` tokens and return its attention mask.

        Returns:
            [B, T + Q] int64 for prompts. Otherwise, an additive mask [B or 1, 1, Q, T], or one such
            mask per layer type. None if every query attends to itself and all earlier columns.
        """
        layout, lookahead = self.layout, self._lookahead
        lookahead.begin(num_query)
        # A query that contains padding needs transformers' mask to leave the same states in the
        # cache.
        reads_padding = not layout.num_columns or layout.num_columns < max(layout.pads)
        if layout.is_even and (num_query > MAX_MASKED_QUERY or reads_padding):
            return lookahead.padding_mask()
        if num_query == 1 and layout.is_even and not any(layout.pads):
            return None
        lookahead.is_masked = True
        num_rows = self.batch_size if self.mask_spec.is_mask_per_row else -1
        return self.mask_spec.masks(
            lambda window: lookahead.mask(window).expand(num_rows, -1, -1, -1)
        )

    def position_ids(self, num_query: int) -> Tensor:
        positions = self._lookahead.positions(num_query)
        starts = [
            length - pad for length, pad in zip(self.layout.lens, self.layout.pads, strict=True)
        ]
        return positions.clamp_min(0) if min(starts) < 0 else positions

    def expect(self, num_tokens: int) -> None:
        self._lookahead.expect(num_tokens)

    def advance(self, num_query: int) -> None:
        self._lookahead.advance(num_query)

    def short_layer(self, num_columns: int) -> ShortLayer | None:
        for index, layer in enumerate(self._layers):
            num_held = (
                layer.base + layer.buffers.keys.shape[2] if layer.is_initialized else num_columns
            )
            if num_held < num_columns:
                return ShortLayer(index, num_held)
        return None

    def crop(
        self, num_tokens_crop: int | Sequence[int] | Tensor, like: RowLens | None = None
    ) -> None:
        drops = checked_drops(num_tokens_crop, self.num_real_tokens)
        if any(drops):
            self._cut(
                [length - drop for length, drop in zip(self.layout.lens, drops, strict=True)], like
            )
            self._holds_rejected = True

    def mark(self) -> Callable[[], None]:
        """Mark the ends of the rows, which forwards advance equally; see `KVCache.mark`."""
        num_columns = self.num_columns

        def restore() -> None:
            self.layout.row_lens.add(num_columns - self.num_columns)
            self._lookahead.restart()
            self._holds_rejected = True

        return restore

    @property
    def holds_rejected(self) -> bool:
        return self._holds_rejected

    def clear_rejected(self) -> None:
        for layer in self._layers:
            layer.clear_behind(self.layout.lens)
        self._holds_rejected = False

    def rows(self, indices: Sequence[int]) -> None:
        row_indices = RowIndices.of(indices)
        self.layout.rows(row_indices)
        surplus, index = self.layout.drop_padding(), row_indices.on(self.device)
        self._lookahead.restart()
        for layer in self._layers:
            layer.select(indices, index, surplus)

    def skip_padding(self) -> int:
        surplus = self.layout.skip_padding()
        self._lookahead.restart()
        return surplus

    def join(self, other: "PreallocatedKVCache") -> None:
        """Append the rows of `other`, which must not be used again.

        The buffers of `other` may have grown.
        """
        for layer, other_layer in zip(self._layers, other._layers, strict=True):
            layer.join(other_layer)
        self.layout.join(other.layout)
        self._lookahead.restart()
        self._holds_rejected |= other.holds_rejected

    def snapshot(self) -> Callable[[], None]:
        """Save the states of `kept_cache`, which do not change until `hand_back`."""
        layers = [] if self._kept_cache is None else self._kept_cache.layers
        return layers_snapshot(layers, only_grows=self.batch_size == 1)

    def hand_back(self) -> None:
        """Put `kept_cache` into the state that plain `generate` leaves.

        Buffers that belong to no pool are freed layer by layer.
        """
        if self._kept_cache is None or not self.num_columns:
            return
        for layer, user_layer in zip(self._layers, holding(self._kept_cache.layers), strict=True):
            state = self._states(layer)
            if not user_layer.is_initialized:  # this sets only the shape, the next line the states
                user_layer.lazy_initialization(state.keys, state.values)
            user_layer.keys, user_layer.values = state
            if self._pool is None:
                layer.release()
            if isinstance(user_layer, DynamicSlidingWindowLayer):
                user_layer.cumulative_length = self.num_columns
        self._kept_cache = None

    def release(self) -> None:
        """Return the buffers to the pool. The cache must not be used afterwards."""
        if self._pool is None:
            return
        if all(layer.is_initialized for layer in self._layers):
            self._pool.give_back(
                self._shape, PooledBuffers([layer.buffers for layer in self._layers], self.graphs)
            )
        self._layers, self.cache, self._pool = [], Cache(layers=[]), None

    def _load(self, kept_cache: Cache) -> None:
        num_kept = int(kept_cache.get_seq_length())
        if not num_kept:
            return
        for layer, user_layer in zip(self._layers, holding(kept_cache.layers), strict=True):
            layer.load(user_layer.keys, user_layer.values, num_kept - user_layer.keys.shape[2])
        self._cut([num_kept] * self.batch_size)

    def _cut(self, lens: Sequence[int], like: RowLens | None = None) -> None:
        """Set the end columns `lens` [B] of the rows; see `RowLens.set` for `like`."""
        self.layout.row_lens.set(lens, like)
        self._lookahead.restart()

    def _states(self, layer: RaggedLayer) -> KVState:
        """Copy the right-aligned states [B, H, T, D] of a layer.

        For a window layer, only the states that the next token needs are copied.
        """
        width = self.num_columns
        first = 0 if layer.window is None else max(width - layer.window + 1, 0)
        # [B or 1, T]
        source = self.layout.row_lens.columns(width - first, first - width - layer.base)
        columns = source.to(layer.device).clamp_min(0)
        return KVState(*(gathered(buffer, columns) for buffer in layer.buffers))
