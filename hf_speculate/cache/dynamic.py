"""A batch's key-value states with rollback by row, over transformers' dynamic cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, EncoderDecoderCache

from hf_speculate.cache.base import bounded, checked_drops, leading
from hf_speculate.cache.layers import check_layers, holding, text_cache
from hf_speculate.cache.snapshots import LayerSnapshot, restore_layers, snapshot_layers
from hf_speculate.types import KVState


class CacheSnapshot(NamedTuple):
    """What brings a cache back after an error: references, and lengths where cropping is enough."""

    num_columns: int
    layers: tuple[LayerSnapshot, ...]
    encoder_layers: tuple[LayerSnapshot, ...]  # what an encoder gave


class DynamicKVCache:
    """`KVCache` over a `DynamicCache`: rows stay right-aligned, so a 2D attention mask says all there is to say.

    Of an `EncoderDecoderCache` only the part that holds the text is rolled back.

    A row that drops more than its neighbours first moves right by the difference, under its padding; then
    `Cache.crop` takes the columns that every row drops. Padding that all rows have gained goes too, so there are
    as many columns as plain `generate` would have.

    Args:
        cache: the transformers cache, which may hold states already.
        batch_size: B.
        attention_mask: [B, T] int64, 1 for real tokens, over the states that the cache holds *and* the prompt tokens
            about to come; None where nothing is padded.
        device: where masks and position ids are made.
        fixed_layers: numbers of the layers that hold what the prompt's pictures gave, which is never rolled back.

    Raises:
        UnsupportedModelError: a layer of the cache is of a kind that cannot be rolled back by row.
    """

    kind = "dynamic"

    def __init__(
        self,
        cache: Cache,
        batch_size: int,
        attention_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        fixed_layers: Sequence[int] = (),
    ):
        self._fixed_layers = frozenset(fixed_layers)
        self._text_cache = text_cache(cache)
        check_layers(self._text_cache)
        self.cache = cache
        self.batch_size = batch_size
        self.device = torch.device(device)
        self._mask = attention_mask  # [B, T] int64 or None; grows with the states
        self._pads = [0] * batch_size
        self._prompt_end = 0 if attention_mask is None else attention_mask.shape[1]  # in columns
        self._steps_back = torch.zeros(batch_size, 1, dtype=torch.int64, device=self.device)
        self._has_holes = False  # whether a row has masked tokens after its first real one
        if attention_mask is not None:
            self._pads = attention_mask.argmax(dim=1).tolist()
            num_real = attention_mask.sum(1)
            num_columns = num_real.cpu() + torch.tensor(self._pads, device="cpu")
            self._has_holes = bool(num_columns.min() < attention_mask.shape[1])
            # Plain decoding goes on from the last column's position, which is 0 where that is masked.
            self._steps_back = torch.where(attention_mask[:, -1] == 0, num_real - 1, 0)[:, None]  # [B, 1]
        self._prompt_pads = list(self._pads)
        self._is_recording = False

    @property
    def _layers(self) -> list[Any]:
        """The cache's own list; `check_layers` knows the classes in it."""
        return self._text_cache.layers

    @property
    def _held(self) -> list[Any]:
        """The layers with states of the text: a config may promise more layers than a decoder has."""
        layers = [layer for place, layer in enumerate(self._layers) if place not in self._fixed_layers]
        return [layer for layer in holding(layers) if layer.is_initialized]

    @property
    def _encoder_layers(self) -> list[Any]:
        """What an encoder gave, by layer; nothing where there is none."""
        return self.cache.cross_attention_cache.layers if isinstance(self.cache, EncoderDecoderCache) else []

    @property
    def num_columns(self) -> int:
        """Columns of the states, padding included."""
        return int(self.cache.get_seq_length())

    @property
    def num_real_tokens(self) -> list[int]:
        """[B] real tokens in each row."""
        if self._has_holes and self._mask is not None:
            return [int(length) for length in self._mask[:, : self.num_columns].sum(1).tolist()]
        num_columns = self.num_columns
        return [max(num_columns - pad, 0) for pad in self._pads]

    def get_num_tokens(self) -> int:
        """Real tokens in the longest row; 0 before the first update."""
        return max(self.num_real_tokens, default=0)

    def get_lens(self) -> Tensor:
        """[B] int64 on the host, real tokens in each row."""
        return torch.tensor(self.num_real_tokens, device="cpu")

    def get_kv_states(self) -> list[KVState]:
        """One `KVState` [B, H, T, D] per layer (window layers hold their window); empty before the first update."""
        return [KVState(layer.keys, layer.values) for layer in self._held] if self.num_columns else []

    def first_tokens(self, counts: Sequence[int]) -> list[KVState] | None:
        """See `KVCache.first_tokens`; there are none of window layers."""
        if self._has_holes or any(isinstance(layer, DynamicSlidingWindowLayer) for layer in self._held):
            return None
        return [leading(state, self._pads, max(counts)) for state in self.get_kv_states()]

    def update(self, states: Sequence[KVState]) -> None:
        """Append one `KVState` [B, H, N, D] per layer to every row."""
        self.mask(states[0].keys.shape[2] if states else 0)  # the new columns are real tokens
        for index, state in enumerate(states):
            self._text_cache.update(state.keys, state.values, index)

    def begin_recording(self) -> None:
        """Keep past window states from here on. Call it once the prompt is in, before the first `crop`."""
        self.cache.activate_past_recording()
        self._is_recording = True

    def advance(self, num_query: int) -> None:
        """Nothing to count: the cache knows what it holds."""

    def hand_back(self) -> None:
        """Leave the cache as plain `generate` would: window layers hold their window only."""
        for layer in self._layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.record_past = False
        self._is_recording = False

    def release(self) -> None:
        """Nothing to release."""

    def mask(self, num_query: int) -> Tensor | None:
        """[B, T + num_query] int64 mask for a forward of `num_query` tokens; None where nothing is padded."""
        if self._mask is None:
            return None
        num_columns = self.num_columns + num_query
        missing = num_columns - self._mask.shape[1]
        if missing > 0:
            self._mask = torch.cat([self._mask, self._mask.new_ones(self.batch_size, missing)], dim=1)  # [B, T+Q]
        return self._mask[:, :num_columns]

    def position_ids(self, num_query: int, max_position: int | None = None) -> Tensor:
        """See `KVCache.position_ids`."""
        start = self.num_columns
        if self._has_holes:
            mask: Any = self.mask(num_query)
            counted = (mask.cumsum(-1) - 1)[:, start:]
            is_prompt = torch.arange(start, start + num_query, device=self.device) < self._prompt_end
            positions = torch.where(is_prompt, counted * mask[:, start:], counted - self._steps_back)
        else:
            positions = torch.arange(start, start + num_query, device=self.device)[None]  # [1, Q]
            if any(self._pads):
                pads = torch.tensor(self._pads, device=self.device)[:, None]
                positions = (positions - pads).clamp_min(0)  # [B, Q]
        return bounded(positions, start + num_query - 1, max_position)

    def crop(self, num_tokens_crop: int | Sequence[int] | Tensor) -> None:
        """See `KVCache.crop`."""
        drops = checked_drops(num_tokens_crop, self.num_real_tokens)
        if not self._is_recording:
            self.begin_recording()
        smallest = min(drops, default=0)
        shifts = [drop - smallest for drop in drops]
        if any(shifts):  # before the crop: a window layer still needs the states that the crop takes
            self._shift_right(shifts)
        for layer in self._held:
            layer.crop(-smallest)
        self._drop_common_padding()
        if self._mask is not None:
            self._mask = self._mask[:, : self.num_columns]

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in place, and only the padding that they need."""
        index = torch.tensor(list(indices), dtype=torch.int64, device="cpu")  # layers may lie on several devices
        self.cache.batch_select_indices(index)
        self.batch_size = len(indices)
        self._pads = [self._pads[row] for row in indices]
        self._prompt_pads = [self._prompt_pads[row] for row in indices]
        common = min(self._prompt_pads, default=0)
        self._prompt_pads = [pad - common for pad in self._prompt_pads]
        self._prompt_end -= common
        self._steps_back = self._steps_back[index.to(self._steps_back.device)]
        if self._mask is not None:
            self._mask = self._mask[index.to(self._mask.device)]
        self._drop_common_padding()
        if not any(self._pads) and not self._has_holes:
            self._mask = None

    def snapshot(self) -> CacheSnapshot:
        """Note what `restore` needs. Full layers of a single row are cropped back, so only their length is kept."""
        layers = snapshot_layers(self._layers, only_grows=self.batch_size == 1)
        return CacheSnapshot(self.num_columns, layers, snapshot_layers(self._encoder_layers, only_grows=False))

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Bring the cache back to what it held at `snapshot`, also from the middle of a forward."""
        restore_layers(self._layers, snapshot.layers)
        restore_layers(self._encoder_layers, snapshot.encoder_layers)
        if isinstance(self.cache, EncoderDecoderCache):
            held = [bool(kept.num_columns) for kept in snapshot.encoder_layers]
            self.cache.is_updated.clear()
            self.cache.is_updated.update(enumerate(held))
        self.hand_back()

    def _shift_right(self, shifts: list[int]) -> None:
        """Move each row right by its shift, in every layer. What it leaves on the left is padding from then on."""
        num_columns = self.num_columns
        mask = self._mask
        if mask is None:
            mask = torch.ones(self.batch_size, num_columns, dtype=torch.int64, device=self.device)
        shift = torch.tensor(shifts, device=self.device)[:, None]  # [B, 1]
        source = torch.arange(num_columns, device=self.device) - shift  # [B, T]
        self._mask = torch.where(source < 0, 0, mask.gather(1, source.clamp_min(0)))
        index: dict[Any, Tensor] = {}
        for layer in self._held:
            key = (*layer.keys.shape[:3], layer.keys.device)
            if key not in index:
                index[key] = _moved_columns(layer.keys.shape[:3], shift.to(layer.keys.device))
            layer.keys, layer.values = (_take(states, index[key]) for states in (layer.keys, layer.values))
        self._pads = [pad + gained for pad, gained in zip(self._pads, shifts, strict=True)]

    def _drop_common_padding(self) -> None:
        """Cut from the left the padding that all rows have gained since the prompt."""
        gained = [now - then for now, then in zip(self._pads, self._prompt_pads, strict=True)]
        surplus = min(gained, default=0)
        if surplus <= 0 or not self.num_columns:
            return
        for layer in self._held:
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None:
                layer.cumulative_length -= surplus
                surplus_held = max(layer.keys.shape[-2] - layer.cumulative_length, 0)
            else:
                surplus_held = surplus
            layer.keys = layer.keys[..., surplus_held:, :]
            layer.values = layer.values[..., surplus_held:, :]
        self._pads = [pad - surplus for pad in self._pads]
        if self._mask is not None:
            self._mask = self._mask[:, surplus:]


def _moved_columns(shape: Sequence[int], shift: Tensor) -> Tensor:
    """[B * H * T] int64: where each column of `shape` [B, H, T] comes from when row b moves right by `shift` [B, 1].

    The oldest column fills the gap.
    """
    batch_size, num_heads, num_columns = shape
    column = (torch.arange(num_columns, device=shift.device) - shift).clamp_min(0)[:, None]  # [B, 1, T]
    first = torch.arange(batch_size * num_heads, device=shift.device).view(batch_size, num_heads, 1) * num_columns
    return (first + column).flatten()


def _take(states: Tensor, index: Tensor) -> Tensor:
    """[B, H, T, D] rebuilt from the columns `index` [B * H * T], as a new tensor: others may hold the old one."""
    return states.reshape(-1, states.shape[-1]).index_select(0, index).view(states.shape)
