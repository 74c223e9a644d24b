"""Look-ahead of preallocated buffers: masks, positions and slot mapping of the next tokens, for several forwards."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_speculate.cache.masks import hidden
from hf_speculate.cache.row_layout import RowLayout
from hf_speculate.rows.row_lens import RowLens

# Entries of a mask from one query to the next, and before its first column: attention on a GPU loads 16 bytes at once.
MASK_UNIT = 8
MAX_ROW_OFFSETS = 16  # tensors of row offsets that are kept, one for each shape of buffers
_PLAIN_STEPS = 16  # plain steps whose masks, positions and slots are computed together


@dataclass
class Mask:
    """Additive mask of some of the next tokens over a range of columns."""

    values: Tensor  # [B or 1, 1, N, W] additive
    first_token: int  # the index of its first query among the next tokens
    first_column: int


@dataclass
class NextTokens:
    """Masks, positions and slots of the next tokens of each row, until a rollback."""

    lens: RowLens  # before the first of these tokens
    num_tokens: int  # N, of each row
    num_done: int = 0  # tokens that forwards have read
    positions: Tensor | None = None  # [B or 1, N] int64, real tokens before each of them
    masks: dict[int | None, Mask] = field(default_factory=dict)  # by the layers' window
    slot_mappings: dict[Hashable, Tensor] = field(default_factory=dict)  # [N, B, H] int64, by the shape of the buffers

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_done


class Lookahead:
    """Masks, positions and slot mapping of forwards over preallocated buffers.

    `expect` announces several forwards, served at once. Changes of the layout but `advance` need `restart` after them.
    """

    def __init__(self, layout: RowLayout, mask_dtype: torch.dtype = torch.float32):
        self.layout = layout
        self.num_query = 0  # tokens of each row in the current forward
        self.num_columns = 0  # columns that some row used before the current forward
        self.is_even = True  # whether all rows had the same length before the current forward
        self.is_masked = False  # whether the current forward is handed an additive mask
        self._num_expected = 0
        self._next = NextTokens(layout.row_lens.copy(), 0)
        self._slot_mappings: dict[Hashable, Tensor] = {}  # slot mappings of the current forward
        self._row_offsets: dict[Hashable, Tensor] = {}
        self._masked = torch.full((), -torch.inf, dtype=mask_dtype, device=layout.device)  # in a mask
        self._unmasked = torch.zeros((), dtype=mask_dtype, device=layout.device)

    @property
    def end(self) -> int:
        """Columns that some row uses once the tokens of the current forward are written."""
        return self.num_columns + self.num_query

    def expect(self, num_tokens: int) -> None:
        """Prepare the next forwards together, which read `num_tokens` tokens of each row before a rollback."""
        self._num_expected = num_tokens
        self._next = NextTokens(self.layout.row_lens.copy(), 0)

    def restart(self) -> None:
        """Forget what was made for the next tokens, as the layout has changed."""
        self.expect(0)

    def begin(self, num_query: int) -> None:
        """Begin a forward over `num_query` tokens of each row."""
        self.num_query, self.is_masked, self._slot_mappings = num_query, False, {}
        self.num_columns, self.is_even = self.layout.num_columns, self.layout.is_even
        if self._next.num_left < num_query:
            num_expected = self._num_expected
            if num_query == 1 and self._next.num_done:  # no rollback since the last forward: plain steps
                num_expected = max(num_expected, _PLAIN_STEPS)
            self._next = NextTokens(self.layout.row_lens.copy(), max(num_query, num_expected))
            self._num_expected = 0

    def advance(self, num_query: int) -> None:
        """Lengthen all rows by the tokens that a forward has read."""
        self.layout.row_lens.add(num_query)
        self._next.num_done += num_query

    def first_seen(self, window: int | None) -> int:
        """The first column that layers of this window hand to attention in the current forward."""
        layout = self.layout
        if window is None or layout.capacity is not None:
            return 0
        first = max(min(layout.lens) - window + 1, 0)
        if self.is_masked and layout.device.type == "cuda":
            first_of_all = max(min(self._next.lens.on_host) - window + 1, 0)  # a buffer may hold none before
            first -= (first - first_of_all) % MASK_UNIT  # the mask hides columns before the window
        return first

    def slot_mapping(self, num_heads: int, capacity: int, base: int, device: torch.device) -> Tensor:
        """[B * H * Q] int64: slots of the current forward's tokens in a flat buffer.

        The buffer is [B * H * capacity, D], and begins with column `base`.
        """
        key = (len(self.layout.lens), num_heads, capacity, base, device)
        if key in self._slot_mappings:
            return self._slot_mappings[key]
        tokens, row_offset = self._next, self._row_offset(*key)
        if tokens.num_tokens == self.num_query:
            columns = tokens.lens.columns(self.num_query).to(device)  # [B or 1, Q]
            slots = row_offset[:, :, None] + columns[:, None]  # [B, H, Q]
        else:
            if key not in tokens.slot_mappings:
                columns = tokens.lens.columns(tokens.num_tokens).to(device)  # [B or 1, N]
                # [N, B, H], in which the slots of one token are contiguous
                tokens.slot_mappings[key] = row_offset + columns.T[:, :, None]
            slots = tokens.slot_mappings[key][tokens.num_done : tokens.num_done + self.num_query].permute(1, 2, 0)
        self._slot_mappings[key] = slots.flatten()
        return self._slot_mappings[key]

    def _row_offset(self, num_rows: int, num_heads: int, capacity: int, base: int, device: torch.device) -> Tensor:
        """[B, H] int64: the slot of column 0 in the flat buffer, by row and head."""
        key = (num_rows, num_heads, capacity, base, device)
        if key not in self._row_offsets:
            if len(self._row_offsets) == MAX_ROW_OFFSETS:
                self._row_offsets = {}  # buffers have grown since
            rows = torch.arange(num_rows * num_heads, device=device).view(-1, num_heads)
            self._row_offsets[key] = rows * capacity - base
        return self._row_offsets[key]

    def padding_mask(self) -> Tensor | None:
        """[B, T + Q] int64: 1 for real tokens, those of the current forward included; None if nothing is padded."""
        return self.layout.padding_mask(self.end)

    def positions(self, num_query: int) -> Tensor:
        """[B or 1, Q] int64: real tokens before each of the next ones; negative in padding."""
        tokens = self._next
        if tokens.positions is None:
            tokens.positions = tokens.lens.positions(tokens.num_tokens, pads=self.layout.pads_on_device())
        return tokens.positions[:, tokens.num_done : tokens.num_done + num_query]

    def mask(self, window: int | None) -> Tensor:
        """[B or 1, 1, Q, T] additive: 0 where a query sees a column, -inf elsewhere; without a window it sees all."""
        tokens = self._next
        mask = tokens.masks.get(window)
        row = tokens.num_done - (0 if mask is None else mask.first_token)
        if mask is None or row + self.num_query > mask.values.shape[2]:
            mask, row = self._make_mask(window), 0
            tokens.masks[window] = mask
        first = self.first_seen(window) - mask.first_column
        return mask.values[:, :, row : row + self.num_query, first : self.end - mask.first_column]

    def _make_mask(self, window: int | None) -> Mask:
        layout, tokens = self.layout, self._next
        is_ragged = any(layout.pads) or not layout.is_even
        num_tokens = tokens.num_left if is_ragged else self.num_query  # later queries of even rows need none
        first = self.first_seen(window)
        width = -(-(layout.num_columns + num_tokens - first) // MASK_UNIT) * MASK_UNIT
        key_positions = layout.positions(first, width)[:, None]  # [B or 1, 1, W]
        query_positions = self.positions(num_tokens)[:, :, None]  # [B or 1, N, 1]
        is_hidden = hidden(key_positions, query_positions, window)
        return Mask(torch.where(is_hidden, self._masked, self._unmasked)[:, None], tokens.num_done, first)
