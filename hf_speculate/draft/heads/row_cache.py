"""Key-value states of a draft head: every row is written at its own end, and dropping states copies nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.cache.columns import additive
from hf_speculate.cache.row_lens import RowCounts, RowLens, Ruler

Buffers = list[tuple[Tensor, Tensor] | None]
"""Keys and values by layer, each [B, heads, capacity, D]; None before a layer is written to."""

# Buffers grow by this factor, so that copying them costs a constant share.
_GROWTH = 2
# Columns are read in multiples of this, which GPU kernels load as vectors.
_ALIGNMENT = 8


@dataclass
class Placed:
    """Where the tokens of one forward are written, and what they attend to."""

    buffers: Buffers
    capacity: int  # columns of the buffers
    row_ids: Tensor  # [B, 1] int64
    columns: Tensor  # [B or 1, N] int64, the columns that they are written to
    width: int  # columns that attention reads
    windows: Sequence[int | None]  # by layer, how many tokens a query attends to; None if to all before it
    dtype: torch.dtype  # of the masks
    # by layer, the first column that holds a token of this layer; empty if it is column 0 in all
    firsts: Sequence[int] = ()
    # by layer, whether tokens of this forward hide those after them; empty if they do in all
    is_causal: Sequence[bool] = ()
    # whether each token sees all `width` columns, so that no mask is needed in layers without a window
    is_bare: bool = False
    masks: dict[tuple[int | None, int, bool], Tensor] = field(default_factory=dict)  # those made so far

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store states [B, heads, N, D], and return those of the columns that attention reads, as views."""
        buffers = self.buffers[layer]
        if buffers is None:
            buffers = self.buffers[layer] = self._zeros(keys), self._zeros(values)
        for buffer, states in zip(buffers, (keys, values), strict=True):
            buffer[self.row_ids, :, self.columns] = states.transpose(1, 2)  # [B, N, heads, D]
        return buffers[0][:, :, : self.width], buffers[1][:, :, : self.width]

    def mask(self, layer: int) -> Tensor | None:
        """[B or 1, 1, N, width] additive; None if the layer's tokens see every column."""
        window = self.windows[layer]
        first = self.firsts[layer] if self.firsts else 0
        is_causal = self.is_causal[layer] if self.is_causal else True
        if self.is_bare and first == 0 and (window is None or window >= self.width):
            return None
        key = (window, first, is_causal)
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
        if first:  # a token before it sees itself: nobody reads what comes of it, but it must be finite
            hidden = hidden | ((seen < first) & (seen != at))
        return hidden

    def _zeros(self, states: Tensor) -> Tensor:  # what masks hide must be finite
        return states.new_zeros(*states.shape[:2], self.capacity, states.shape[3])


class RowCache:
    """Keys and values of B rows by layer; a row's next token goes where it ends, and masks hide what lies behind."""

    def __init__(self, windows: Sequence[int | None], firsts: Sequence[int], batch_size: int, weight: Tensor):
        device = weight.device
        self.row_lens = RowLens([0] * batch_size, Ruler(device))
        self.buffers: Buffers = [None] * len(windows)
        self.capacity = 0
        self._layers = windows, weight.dtype, firsts  # see `Placed`
        self._row_ids = torch.arange(batch_size, device=device)[:, None]  # [B, 1]

    def place(self, num_tokens: int, offset: int = 0, is_causal: Sequence[bool] = ()) -> Placed:
        """Make room for N tokens behind each row's end and the `offset` columns that this round wrote; see `Placed`."""
        longest = max(self.row_lens.on_host, default=0) + offset + num_tokens
        is_bare = num_tokens == 1 and self.row_lens.is_even
        width = longest if is_bare else _aligned(longest)
        self.reserve(_aligned(longest))
        columns = self.row_lens.positions(num_tokens, offset)  # [B or 1, N]
        return Placed(self.buffers, self.capacity, self._row_ids, columns, width, *self._layers, is_causal, is_bare)

    def advance(self, counts: Sequence[int], on_device: Tensor) -> None:
        """Keep the first `counts` [B] tokens of those that were written last; `on_device` is the same as [B] int64."""
        self.row_lens.add_counts(RowCounts(counts, on_device))

    def rows(self, indices: Sequence[int]) -> None:
        index = torch.tensor(list(indices), dtype=torch.int64, device=self._row_ids.device)
        self.row_lens.rows(indices, index)
        self._row_ids = self._row_ids[: len(index)]
        self.buffers = [None if pair is None else (pair[0][index], pair[1][index]) for pair in self.buffers]

    def reserve(self, num_columns: int) -> None:
        """Make the buffers hold so many columns or more."""
        if num_columns <= self.capacity:
            return
        more = max(num_columns, _GROWTH * self.capacity) - self.capacity
        self.capacity += more
        self.buffers = [
            None if pair is None else (_longer(pair[0], more), _longer(pair[1], more)) for pair in self.buffers
        ]


class PlacedCache(Cache):
    """A transformers `Cache` for one forward over a `RowCache`."""

    def __init__(self, placed: Placed):
        super().__init__(layers=[])
        self._placed = placed

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._placed.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that attention reads: a row's own length is in no Python number."""
        return self._placed.width


def _aligned(num_columns: int) -> int:
    return -(-num_columns // _ALIGNMENT) * _ALIGNMENT


def _longer(buffer: Tensor, num_columns: int) -> Tensor:
    return torch.nn.functional.pad(buffer, (0, 0, 0, num_columns))
