"""Look-ahead of preallocated buffers, for several forwards.

It holds masks, positions and the slot mapping of the next tokens.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_speculate.cache.masks import hidden
from hf_speculate.cache.row_layout import RowLayout
from hf_speculate.rows.row_lens import RowLens

# Alignment of the rows of a mask and of its first column, in entries: attention on a GPU loads 16
# bytes at once.
MASK_UNIT = 8
MAX_ROW_OFFSETS = 16  # number of cached row offsets, one tensor per shape of buffers
_PLAIN_STEPS = 16  # plain steps with jointly computed masks, positions and slots


@dataclass
class Mask:
    """Additive mask of next tokens over some columns."""

    values: Tensor  # [B or 1, 1, N, W] additive
    first_token: int  # index of the first query among the next tokens
    first_column: int


@dataclass
class NextTokens:
    """Masks, positions and slots until a rollback."""

    lens: RowLens  # before the first of these tokens
    num_tokens: int  # N, of each row
    num_done: int = 0  # tokens read by forwards
    positions: Tensor | None = None  # [B or 1, N] int64, number of real tokens before each
    masks: dict[int | None, Mask] = field(default_factory=dict)  # by the layers' window
    # [N, B, H] int64, by the shape of the buffers
    slot_mappings: dict[Hashable, Tensor] = field(default_factory=dict)

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_done


class Lookahead:
    """Masks, positions and slots over preallocated buffers.

    `expect` announces several forwards and lets them share one computation. Changes of the layout
    other than `advance` need a `restart`.
    """

    def __init__(self, layout: RowLayout, mask_dtype: torch.dtype = torch.float32):
        self.layout = layout
        self.num_query = 0  # tokens of each row in the current forward
        self.num_columns = 0  # columns of the longest row before the current forward
        self.is_even = True  # whether rows had equal lengths before the current forward
        self.is_masked = False  # whether the current forward gets an additive mask
        self._num_expected = 0
        self._next = NextTokens(layout.row_lens.copy(), 0)
        self._slot_mappings: dict[Hashable, Tensor] = {}  # slot mappings of the current forward
        self._row_offsets: dict[Hashable, Tensor] = {}
        # in a mask
        self._masked = torch.full((), -torch.inf, dtype=mask_dtype, device=layout.device)
        self._unmasked = torch.zeros((), dtype=mask_dtype, device=layout.device)

    @property
    def end(self) -> int:
        """Columns of the longest row after the current forward."""
        return self.num_columns + self.num_query

    def expect(self, num_tokens: int) -> None:
        """Prepare forwards over `num_tokens` tokens per row, up to the next rollback, at once."""
        self._num_expected = num_tokens
        self._next = NextTokens(self.layout.row_lens.copy(), 0)

    def restart(self) -> None:
        """Forget masks, positions and slots after a change of the layout."""
        self.expect(0)

    def begin(self, num_query: int) -> None:
        """Begin a forward over `num_query` tokens of each row."""
        self.num_query, self.is_masked, self._slot_mappings = num_query, False, {}
        self.num_columns, self.is_even = self.layout.num_columns, self.layout.is_even
        if self._next.num_left < num_query:
            num_expected = self._num_expected
            # no rollback since the last forward: plain steps
            if num_query == 1 and self._next.num_done:
                num_expected = max(num_expected, _PLAIN_STEPS)
            self._next = NextTokens(self.layout.row_lens.copy(), max(num_query, num_expected))
            self._num_expected = 0

    def advance(self, num_query: int) -> None:
        """Lengthen all rows by the `num_query` tokens of a forward."""
        self.layout.row_lens.add(num_query)
        self._next.num_done += num_query

    def first_seen(self, window: int | None) -> int:
        """Return the first column for attention of the current forward in layers of this window."""
        layout = self.layout
        if window is None or layout.capacity is not None:
            return 0
        first = max(min(layout.lens) - window + 1, 0)
        if self.is_masked and layout.device.type == "cuda":
            # a buffer may hold none before
            first_of_all = max(min(self._next.lens.on_host) - window + 1, 0)
            first -= (first - first_of_all) % MASK_UNIT  # the mask hides columns before the window
        return first

    def slot_mapping(
        self, num_heads: int, capacity: int, base: int, device: torch.device
    ) -> Tensor:
        """Return the slots of the current forward's tokens in a flat buffer, [B * H * Q] int64.

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
                # The slots of one token are contiguous in [N, B, H].
                tokens.slot_mappings[key] = row_offset + columns.T[:, :, None]
            slots = tokens.slot_mappings[key][
                tokens.num_done : tokens.num_done + self.num_query
            ].permute(1, 2, 0)
        self._slot_mappings[key] = slots.flatten()
        return self._slot_mappings[key]

    def _row_offset(
        self, num_rows: int, num_heads: int, capacity: int, base: int, device: torch.device
    ) -> Tensor:
        """Return the slot of column 0 in the flat buffer, by row and head, [B, H] int64."""
        key = (num_rows, num_heads, capacity, base, device)
        if key not in self._row_offsets:
            if len(self._row_offsets) == MAX_ROW_OFFSETS:
                self._row_offsets = {}  # buffers have grown since
            rows = torch.arange(num_rows * num_heads, device=device).view(-1, num_heads)
            self._row_offsets[key] = rows * capacity - base
        return self._row_offsets[key]

    def padding_mask(self) -> Tensor | None:
        """Return the mask [B, T + Q] int64 of the current forward, 1 for real tokens.

        The result is None without padding.
        """
        return self.layout.padding_mask(self.end)

    def positions(self, num_query: int) -> Tensor:
        """Count the real tokens before each next token, [B or 1, Q] int64; negative in padding."""
        tokens = self._next
        if tokens.positions is None:
            tokens.positions = tokens.lens.positions(
                tokens.num_tokens, pads=self.layout.pads_on_device()
            )
        return tokens.positions[:, tokens.num_done : tokens.num_done + num_query]

    def mask(self, window: int | None) -> Tensor:
        """Return the additive mask [B or 1, 1, Q, T]: 0 for visible columns, -inf for others.

        Args:
            window: tokens visible to a query, itself included; None for all.
        """
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
        # later queries of even rows need none
        num_tokens = tokens.num_left if is_ragged else self.num_query
        first = self.first_seen(window)
        width = -(-(layout.num_columns + num_tokens - first) // MASK_UNIT) * MASK_UNIT
        key_positions = layout.positions(first, width)[:, None]  # [B or 1, 1, W]
        query_positions = self.positions(num_tokens)[:, :, None]  # [B or 1, N, 1]
        is_hidden = hidden(key_positions, query_positions, window)
        return Mask(
            torch.where(is_hidden, self._masked, self._unmasked)[:, None], tokens.num_done, first
        )
