"""Dynamic KV cache: transformers' own cache with per-row rollback."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from hf_speculate.cache.base import KVCache, LayerView, ShortLayer, checked_drops, leading
from hf_speculate.cache.layers import (
    ATTENTION_LAYERS,
    attention_layers,
    check_layers,
    layers_snapshot,
    text_cache,
    window_of,
)
from hf_speculate.cache.left_padding import LeftPadding, shift_rows
from hf_speculate.rows.per_row import RowIndices
from hf_speculate.rows.row_lens import RowLens
from hf_speculate.types import KVState


class DynamicKVCache(KVCache):
    """`KVCache` over a `DynamicCache` with right-aligned rows.

    A 2D attention mask is enough. In a rollback, a row that drops more tokens than other rows first
    moves right by the difference and gains padding. The last columns, which every row drops, are
    then cut off. Padding gained by all rows is also cut off, because plain `generate` has none.
    """

    kind = "dynamic"
    layer_types: tuple[type, ...] = ATTENTION_LAYERS
    """Classes of layers that support rollback."""

    def __init__(
        self,
        cache: Cache,  # transformers cache, with or without states
        batch_size: int,
        attention_mask: Tensor | None = None,  # [B, T] int64 over the cache's states and the prompt
        device: torch.device | str = "cpu",  # device of masks and position ids
        fixed_layers: frozenset[int] = frozenset(),  # layers with image states, never rolled back
    ):
        self._fixed_layers = fixed_layers
        self._text_cache: Any = text_cache(cache)
        check_layers(self._text_cache, self.layer_types)
        self.cache = cache
        self.batch_size = batch_size
        self.device = torch.device(device)
        self._prompt_end = 0 if attention_mask is None else attention_mask.shape[1]  # in columns
        self._steps_back = torch.zeros(batch_size, 1, dtype=torch.int64, device=self.device)
        self._mask: Tensor | None = None  # [B, T] int64, grows with the states; None without holes
        pads = [0] * batch_size
        if attention_mask is not None:
            pads = attention_mask.argmax(dim=1).tolist()
            num_real = attention_mask.sum(1)
            num_columns = num_real.cpu() + torch.tensor(pads, device="cpu")
            if bool(num_columns.min() < attention_mask.shape[1]):
                self._mask = attention_mask
            # Plain decoding continues from the position of the last column, which is 0 if the
            # column is masked.
            # [B, 1]
            self._steps_back = torch.where(attention_mask[:, -1] == 0, num_real - 1, 0)[:, None]
        self._padding = LeftPadding(pads, self.device)
        self._is_recording = False

    @property
    def _text_layers(self) -> list[Any]:
        """Layers with text states. A config may name more layers than the decoder has."""
        layers = [
            layer
            for index, layer in enumerate(self._text_cache.layers)
            if index not in self._fixed_layers
        ]
        return [layer for layer in attention_layers(layers) if layer.is_initialized]

    @property
    def _encoder_layers(self) -> list[Any]:
        """Cache layers with encoder states; empty without an encoder."""
        return (
            self.cache.cross_attention_cache.layers
            if isinstance(self.cache, EncoderDecoderCache)
            else []
        )

    @property
    def num_columns(self) -> int:
        return int(self.cache.get_seq_length())

    @property
    def num_real_tokens(self) -> list[int]:
        if self._mask is not None:
            return [int(length) for length in self._mask[:, : self.num_columns].sum(1).tolist()]
        num_columns = self.num_columns
        return [max(num_columns - pad, 0) for pad in self._padding.pads]

    def get_kv_states(self) -> list[KVState]:
        """Return one `KVState` [B, H, T, D] per layer.

        A window layer returns the states in its window. An empty cache has no layers.
        """
        return (
            [KVState(layer.keys, layer.values) for layer in self._text_layers]
            if self.num_columns
            else []
        )

    def view(self, layer: int, window: int | None = None) -> LayerView:
        states, num_columns = self._text_layers[layer], self.num_columns
        width = min(states.keys.shape[2], window or num_columns)
        keys, values = (part[:, :, -width:] for part in (states.keys, states.values))
        if self._mask is not None:
            return LayerView(
                keys, values, self._mask[:, None, num_columns - width : num_columns] == 0
            )
        positions = self._padding.positions_before(num_columns, width)  # [B or 1, T]
        return LayerView(keys, values, None if positions is None else (positions < 0)[:, None])

    def last_positions(self) -> Tensor:
        return self.position_ids(1) - 1

    def first_tokens(self, counts: Sequence[int]) -> list[KVState] | None:
        if self._mask is not None or any(
            isinstance(layer, DynamicSlidingWindowLayer) for layer in self._text_layers
        ):
            return None
        return [leading(state, self._padding.pads, max(counts)) for state in self.get_kv_states()]

    def short_layer(self, num_columns: int) -> ShortLayer | None:
        for index, layer in enumerate(self._text_layers):
            num_held, window = layer.keys.shape[2], window_of(layer)
            if num_held < (num_columns if window is None else min(num_columns, window - 1)):
                return ShortLayer(index, num_held)
        return None

    def update(self, states: Sequence[KVState]) -> None:
        self.mask(states[0].keys.shape[2] if states else 0)  # the new columns are real tokens
        for index, state in enumerate(states):
            self._text_cache.update(state.keys, state.values, index)

    def begin_recording(self) -> None:
        self._record(True)

    def hand_back(self) -> None:
        self._record(False)

    def _record(self, is_recording: bool) -> None:
        """Let window layers keep more states for rollbacks, or only their window."""
        for layer in self._text_cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.record_past = is_recording
        self._is_recording = is_recording

    @property
    def join_obstacle(self) -> str:
        if any(isinstance(layer, DynamicSlidingWindowLayer) for layer in self._text_cache.layers):
            return "layers with a window drop the states of a dynamic cache"
        if self._fixed_layers or self._encoder_layers:
            return "the cache holds states of pictures or of an encoder"
        return "" if self._mask is None else "the attention mask has holes"

    def join(self, other: "DynamicKVCache") -> None:
        num_columns, num_joining_columns = self.num_columns, other.num_columns
        longest = max(num_columns, num_joining_columns)
        for layer, joining in zip(self._text_layers, other._text_layers, strict=True):
            layer.keys = _joined(layer.keys, joining.keys, longest)
            layer.values = _joined(layer.values, joining.values, longest)
        self._padding.join(other._padding, num_columns, num_joining_columns)
        self._steps_back = torch.cat([self._steps_back, other._steps_back])
        self.batch_size += other.batch_size
        self._drop_common_padding()

    def mask(self, num_query: int) -> Tensor | None:
        """Return the mask [B, T + num_query] int64 for a forward over `num_query` tokens.

        The result is None without padding.
        """
        if self._mask is None:
            return self._padding.mask(self.num_columns, num_query)
        num_columns = self.num_columns + num_query
        missing = num_columns - self._mask.shape[1]
        if missing > 0:
            # [B, T+Q]
            self._mask = torch.cat(
                [self._mask, self._mask.new_ones(self.batch_size, missing)], dim=1
            )
        return self._mask[:, :num_columns]

    def position_ids(self, num_query: int) -> Tensor:
        start = self.num_columns
        if self._mask is None:
            return self._padding.positions(start, num_query)
        mask: Any = self.mask(num_query)
        counted = (mask.cumsum(-1) - 1)[:, start:]
        is_prompt = torch.arange(start, start + num_query, device=self.device) < self._prompt_end
        return torch.where(is_prompt, counted * mask[:, start:], counted - self._steps_back)

    def expect(self, num_tokens: int) -> None:
        self._padding.expect(num_tokens)

    def crop(
        self, num_tokens_crop: int | Sequence[int] | Tensor, like: RowLens | None = None
    ) -> None:
        drops = checked_drops(num_tokens_crop, self.num_real_tokens)
        if not self._is_recording:
            self.begin_recording()
        shift = self._padding.drop(drops, self.num_columns, like)
        # Shift first: cropping a sliding-window layer also removes older states, and shifted rows
        # still need them.
        if shift is not None:
            if self._mask is not None:
                self._mask = self._moved(self._mask, shift.sources(self.num_columns))
            shift_rows(self._text_layers, shift)
        self._drop_last(min(drops, default=0))
        self._drop_common_padding()
        if self._mask is not None:
            self._mask = self._mask[:, : self.num_columns]
        self.expect(0)

    def mark(self) -> Callable[[], None]:
        return layers_snapshot(self._text_cache.layers, only_grows=True)

    def rows(self, indices: Sequence[int]) -> None:
        self._prompt_end -= self._padding.rows(indices, self.num_columns)
        devices = {
            layer.keys.device
            for layer in (*self._text_layers, *self._encoder_layers)
            if layer.is_initialized
        }
        # Layers on several devices cannot share an index on one device.
        index = RowIndices.of(indices).on(
            devices.pop() if len(devices) == 1 else torch.device("cpu")
        )
        self._select_rows(index)
        self.batch_size = len(indices)
        self._steps_back = self._steps_back[index.to(self._steps_back.device)]
        if self._mask is not None:
            self._mask = self._mask[index.to(self._mask.device)]
        self._drop_common_padding()

    def skip_padding(self) -> int:
        num_columns = self._padding.skip()
        if self._mask is not None:
            self._mask = self._mask[:, num_columns:]
            self._prompt_end = self._mask.shape[1]
        return num_columns

    def snapshot(self) -> Callable[[], None]:
        """Save the states; see `KVCache.snapshot`.

        With a single row, full-attention layers are cropped back, so saving their length is enough.
        """
        restore_text = layers_snapshot(self._text_cache.layers, only_grows=self.batch_size == 1)
        restore_encoder = layers_snapshot(self._encoder_layers, only_grows=False)

        def restore() -> None:
            restore_text()
            restore_encoder()
            if isinstance(self.cache, EncoderDecoderCache):
                has_states = [bool(layer.get_seq_length()) for layer in self._encoder_layers]
                self.cache.is_updated.clear()
                self.cache.is_updated.update(enumerate(has_states))
            self.hand_back()

        return restore

    def _moved(self, mask: Tensor, source: Tensor) -> Tensor:
        """Gather the columns `source` [B, T] int64 of a mask; negative sources become padding."""
        return torch.where(
            source < 0, 0, mask[:, : self.num_columns].gather(1, source.clamp_min(0))
        )

    def _select_rows(self, index: Tensor) -> None:
        self.cache.batch_select_indices(index)

    def _drop_last(self, num_tokens: int) -> None:
        for layer in self._text_layers:  # a mixed layer's `crop` would also crop recurrent states
            layer_class = (
                DynamicSlidingWindowLayer
                if isinstance(layer, DynamicSlidingWindowLayer)
                else DynamicLayer
            )
            layer_class.crop(layer, -num_tokens)

    def _drop_common_padding(self) -> None:
        """Cut off the left padding that all rows have gained since the prompt."""
        surplus = self._padding.surplus() if self.num_columns else 0
        if surplus <= 0:
            return
        for layer in self._text_layers:
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None:
                layer.cumulative_length -= surplus
                num_dropped = max(layer.keys.shape[-2] - layer.cumulative_length, 0)
            else:
                num_dropped = surplus
            layer.keys = layer.keys[..., num_dropped:, :]
            layer.values = layer.values[..., num_dropped:, :]
        if self._mask is not None:
            self._mask = self._mask[:, surplus:]


def _joined(states: Tensor, joining: Tensor, num_columns: int) -> Tensor:
    """Join states [B, H, N, D] and [B', H, N', D], zero-padded on the left to T columns.

    The result has the shape [B + B', H, T, D].
    """
    return torch.cat(
        [pad(part, (0, 0, num_columns - part.shape[2], 0)) for part in (states, joining)]
    )
