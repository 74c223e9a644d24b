"""Look-ahead over preallocated buffers.

It computes masks, positions and slot mappings for the next tokens of several forwards at once.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_speculate.cache.masks import hidden
from hf_speculate.cache.row_layout import RowLayout
from hf_speculate.rows.row_lens import RowLens

# Alignment of a mask's rows and first column, in entries. GPU attention kernels load 16 bytes at
# once.
MASK_UNIT = 8
MAX_ROW_OFFSETS = 16  # maximum number of cached row offsets, one tensor per buffer shape
_PLAIN_STEPS = 16  # number of plain steps whose masks, positions and slots are computed at once


@dataclass
class Mask:
    """Additive mask of the next tokens over a range of columns."""

    values: Tensor  # [B or 1, 1, N, W], 0 for visible columns, -inf for hidden columns
    first_token: int  # index of the first query among the next tokens
    first_column: int


@dataclass
class NextTokens:
    """Masks, positions and slots of the next tokens, valid until a rollback."""

    lens: RowLens  # row lengths before the first of these tokens
    num_tokens: int  # N, number of tokens per row
    num_done: int = 0  # number of tokens per row that forwards have read
    positions: Tensor | None = None  # [B or 1, N] int64, number of real tokens before each token
    masks: dict[int | None, Mask] = field(default_factory=dict)  # by layer window
    # [N, B, H] int64, by buffer shape
    slot_mappings: dict[Hashable, Tensor] = field(default_factory=dict)

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_done


class Lookahead:
    """Masks, positions and slots over preallocated buffers.

    `expect` announces several forwards, which then share one computation. After a change to the
    layout other than `advance`, `restart` must be called.
    """

    def __init__(self, layout: RowLayout, mask_dtype: torch.dtype = torch.float32):
        self.layout = layout
        self.num_query = 0  # number of tokens per row in the current forward
        self.num_columns = 0  # number of columns of the longest row before the current forward
        self.is_even = True  # whether rows had equal lengths before the current forward
        self.is_masked = False  # whether the current forward gets an additive mask
        self._num_expected = 0
        self._next = NextTokens(layout.row_lens.copy(), 0)
        self._slot_mappings: dict[Hashable, Tensor] = {}  # slot mappings of the current forward
        self._row_offsets: dict[Hashable, Tensor] = {}
        # value of hidden columns in a mask
        self._masked = torch.full((), -torch.inf, dtype=mask_dtype, device=layout.device)
        self._unmasked = torch.zeros((), dtype=mask_dtype, device=layout.device)

    @property
    def end(self) -> int:
        """Number of columns of the longest row after the current forward."""
        return self.num_columns + self.num_query

    def expect(self, num_tokens: int) -> None:
        """Prepare all forwards up to the next rollback at once, `num_tokens` tokens per row."""
        self._num_expected = num_tokens
        self._next = NextTokens(self.layout.row_lens.copy(), 0)

    def restart(self) -> None:
        """Forget masks, positions and slots after a change to the layout."""
        self.expect(0)

    def begin(self, num_query: int) -> None:
        """Begin a forward over `num_query` tokens per row."""
        self.num_query, self.is_masked, self._slot_mappings = num_query, False, {}
        self.num_columns, self.is_even = self.layout.num_columns, self.layout.is_even
        if self._next.num_left < num_query:
            num_expected = self._num_expected
            # There was no rollback since the last forward, so these are plain steps.
            if num_query == 1 and self._next.num_done:
                num_expected = max(num_expected, _PLAIN_STEPS)
            self._next = NextTokens(self.layout.row_lens.copy(), max(num_query, num_expected))
            self._num_expected = 0

    def advance(self, num_query: int) -> None:
        """Extend all rows by the `num_query` tokens of a forward."""
        self.layout.row_lens.add(num_query)
        self._next.num_done += num_query

    def first_seen(self, window: int | None) -> int:
        """Return the first column that the current forward attends to in layers of this window."""
        layout = self.layout
        if window is None or layout.capacity is not None:
            return 0
        first = max(min(layout.lens) - window + 1, 0)
        if self.is_masked and layout.device.type == "cuda":
            # a buffer may hold no earlier columns
            first_of_all = max(min(self._next.lens.on_host) - window + 1, 0)
            first -= (first - first_of_all) % MASK_UNIT  # the mask hides columns before the window
        return first

    def slot_mapping(
        self, num_heads: int, capacity: int, base: int, device: torch.device
    ) -> Tensor:
        """Return the slots for the current forward's tokens in a flat buffer, [B * H * Q] int64.

        The buffer is [B * H * capacity, D]. Its first column is `base`.
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
        """Return the slot of column 0 in the flat buffer for each row and head, [B, H] int64."""
        key = (num_rows, num_heads, capacity, base, device)
        if key not in self._row_offsets:
            if len(self._row_offsets) == MAX_ROW_OFFSETS:
                self._row_offsets = {}  # most entries are for buffers that have since grown
            rows = torch.arange(num_rows * num_heads, device=device).view(-1, num_heads)
            self._row_offsets[key] = rows * capacity - base
        return self._row_offsets[key]

    def padding_mask(self) -> Tensor | None:
        """Return the mask [B, T + Q] int64 of the current forward, 1 for real tokens.

        The result is None without padding.
        """
        return self.layout.padding_mask(self.end)

    def positions(self, num_query: int) -> Tensor:
        """Count the real tokens before each query token, [B or 1, Q] int64; negative in padding."""
        tokens = self._next
        if tokens.positions is None:
            tokens.positions = tokens.lens.positions(
                tokens.num_tokens, pads=self.layout.pads_on_device()
            )
        return tokens.positions[:, tokens.num_done : tokens.num_done + num_query]

    def mask(self, window: int | None) -> Tensor:
        """Return the additive mask [B or 1, 1, Q, T]: 0 for visible columns, -inf for hidden ones.

        Args:
            window: Number of tokens visible to a query, including the query; None for all tokens.
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
        # later queries of rows with equal lengths need no mask
        num_tokens = tokens.num_left if is_ragged else self.num_query
        first = self.first_seen(window)
        width = -(-(layout.num_columns + num_tokens - first) // MASK_UNIT) * MASK_UNIT
        key_positions = layout.positions(first, width)[:, None]  # [B or 1, 1, W]
        query_positions = self.positions(num_tokens)[:, :, None]  # [B or 1, N, 1]
        is_hidden = hidden(key_positions, query_positions, window)
        return Mask(
            torch.where(is_hidden, self._masked, self._unmasked)[:, None], tokens.num_done, first
        )
