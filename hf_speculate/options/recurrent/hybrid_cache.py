"""Hybrid KV cache: transformers' dynamic cache and recurrent states that roll back per row."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from hf_speculate.cache.base import ShortLayer, checked_drops, gathered
from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.cache.layers import (
    ATTENTION_LAYERS,
    RECURRENT_LAYERS,
    attention_layers,
    num_cached,
)
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.options.recurrent.states import RecurrentStates
from hf_speculate.rows.row_lens import RowLens
from hf_speculate.types import KVState


class HybridKVCache(DynamicKVCache):
    """A `KVCache` over a `DynamicCache` with recurrent layers.

    A row can return to its states after any token since the last `crop`. If a row drops more tokens
    than that, it keeps its states. Its next forward begins with tokens that the states already
    include, and these tokens do not change the states.
    """

    kind = "hybrid"
    can_mark = False
    layer_types = (*ATTENTION_LAYERS, *RECURRENT_LAYERS)

    def __init__(
        self,
        cache: Cache,
        states: RecurrentStates,
        # adds hooks for token-by-token reading
        attach: Sequence[Callable[[list[RemovableHandle]], None]],
        batch_size: int,
        attention_mask: Tensor | None,
        device: torch.device,
        steps_after_states: bool = False,  # whether later forwards read their tokens one by one
    ):
        super().__init__(cache, batch_size, attention_mask, device)
        self._steps_after_states = steps_after_states
        self.states = states
        self._attach = attach
        self._hooks: list[RemovableHandle] = []
        self._has_attention = bool(attention_layers(cache.layers))
        self._num_columns = num_cached(cache)
        self._num_reread = [0] * batch_size  # [B] number of next tokens already in a row's states
        self._num_passed = [0] * batch_size  # [B] number of repeated tokens since the last rollback
        self._num_announced = 0  # Q of the next forward, once `states` is prepared; else 0

    @property
    def num_columns(self) -> int:
        return self._num_columns

    @property
    def num_real_tokens(self) -> list[int]:
        return [
            count - num_reread
            for count, num_reread in zip(super().num_real_tokens, self._num_reread, strict=True)
        ]

    def first_tokens(self, counts: Sequence[int]) -> None:
        """Return None: earlier recurrent states are not stored."""

    def update(self, states: Sequence[KVState]) -> None:
        """Raise `UnsupportedModelError`: keys and values do not determine recurrent states."""
        raise UnsupportedModelError(
            "recurrent states must come from a forward, got keys and values; feed the tokens"
        )

    def mask(self, num_query: int) -> Tensor | None:
        """Prepare a forward and return its mask.

        Without attention layers, only the prompt has a mask, which is as wide as the query.
        """
        self._announce(num_query)
        mask = super().mask(num_query)
        if not self._has_attention:
            return None if mask is None or self._is_recording else mask[:, -num_query:]
        if not any(self._num_reread):
            return mask
        shape = self.batch_size, self.num_columns + num_query
        mask = (
            torch.ones(shape, dtype=torch.int64, device=self.device)
            if mask is None
            else mask.clone()
        )
        for row, count in enumerate(self._num_reread):
            mask[row, self.num_columns : self.num_columns + count] = 0
        return mask

    def position_ids(self, num_query: int) -> Tensor:
        positions = super().position_ids(num_query)
        if not any(self._num_reread) or self._mask is not None:
            return positions
        return (positions - torch.tensor(self._num_reread, device=self.device)[:, None]).clamp_min(
            0
        )

    def advance(self, num_query: int) -> None:
        self.states.end(num_query)
        self._num_announced = 0
        num_before, self._num_columns = self._num_columns, self._num_columns + num_query
        passed = [min(count, num_query) for count in self._num_reread]
        if any(passed):
            self._close_gaps(num_before, passed)
            self._num_reread = [
                count - num_passed
                for count, num_passed in zip(self._num_reread, passed, strict=True)
            ]
            self._num_passed = [
                count + num_passed
                for count, num_passed in zip(self._num_passed, passed, strict=True)
            ]
            self._drop_common_padding()

    def short_layer(self, num_columns: int) -> ShortLayer | None:
        return super().short_layer(self.num_columns)

    def begin_recording(self) -> None:
        super().begin_recording()
        self._num_passed = [0] * self.batch_size
        self.states.restart()

    def crop(
        self, num_tokens_crop: int | Sequence[int] | Tensor, like: RowLens | None = None
    ) -> None:
        drops = checked_drops(num_tokens_crop, self.num_real_tokens)
        self._is_recording = True
        wanted = [
            drop + num_reread for drop, num_reread in zip(drops, self._num_reread, strict=True)
        ]
        num_tokens = self.states.num_tokens
        dropped = [
            min(count, num_tokens - num_passed)
            for count, num_passed in zip(wanted, self._num_passed, strict=True)
        ]
        self.states.roll_back([num_tokens - count for count in dropped])
        self._num_reread = self._num_passed = [0] * self.batch_size
        super().crop(dropped, like if dropped == drops else None)
        self._num_reread = [
            count - num_dropped for count, num_dropped in zip(wanted, dropped, strict=True)
        ]

    def rows(self, indices: Sequence[int]) -> None:
        self._num_reread = [self._num_reread[row] for row in indices]
        self._num_passed = [0] * len(indices)
        super().rows(indices)

    def join(self, other: "HybridKVCache") -> None:  # type: ignore[override]
        other.release()
        self.states.join(other.states)
        self._num_reread = [*self._num_reread, *other._num_reread]
        self._num_passed = [0] * len(self._num_reread)
        num_gained = max(other.num_columns - self.num_columns, 0)
        super().join(other)
        self._num_columns += num_gained

    def snapshot(self) -> Callable[[], None]:
        restores = super().snapshot(), self.states.snapshot()

        def restore() -> None:
            for restore_one in restores:
                restore_one()

        return restore

    def hand_back(self) -> None:
        super().hand_back()
        self.states.finish()

    def release(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _announce(self, num_query: int) -> None:
        """Prepare the states for the next forward; repeated calls change nothing."""
        if self._num_announced == num_query:
            return
        self._num_announced = num_query
        if self._steps_after_states and self.num_columns and not self._is_recording:
            self.begin_recording()
        is_prompt = not self._is_recording and (num_query > 1 or not self.num_columns)
        num_skipped = (
            [min(count, num_query) for count in self._num_reread] if any(self._num_reread) else None
        )
        self.states.begin(num_query, is_prompt=is_prompt, num_skipped=num_skipped)
        if self.states.is_stepping and not self._hooks:
            for attach in self._attach:
                attach(self._hooks)

    def _select_rows(self, index: Tensor) -> None:
        self.states.rows(index)
        for layer in self._text_layers:
            layer.batch_select_indices(index)

    def _drop_last(self, num_columns: int) -> None:
        super()._drop_last(num_columns)
        self._num_columns -= num_columns

    def _drop_common_padding(self) -> None:
        num_pads = self._padding.pads[0]
        super()._drop_common_padding()
        self._num_columns -= num_pads - self._padding.pads[0]

    def _close_gaps(self, start: int, widths: Sequence[int]) -> None:
        """Move each row's columns before `start` right, over `widths` [B] repeated columns."""
        width = torch.tensor(widths, device=self.device)[:, None]  # [B, 1]
        columns = torch.arange(self.num_columns, device=self.device)
        source = torch.where(columns < start + width, columns - width, columns)  # [B, T]
        if self._mask is not None:
            self._mask = self._moved(self._mask, source)
        for layer in self._text_layers:
            index = source.clamp_min(0).to(layer.keys.device)
            layer.keys, layer.values = gathered(layer.keys, index), gathered(layer.values, index)
        self._padding.pads = [
            pad + shift for pad, shift in zip(self._padding.pads, widths, strict=True)
        ]
        self.expect(0)
