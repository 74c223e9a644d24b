"""Attention masks and position ids over preallocated buffers."""

import torch
from torch import Tensor

from hf_speculate.cache.columns import MASK_UNIT, Columns, Mask
from hf_speculate.transfers import upload

_PADDING = torch.iinfo(torch.int64).max  # as a column's position: after all tokens


class Masking:
    """Makes masks that hide padding, later tokens, and tokens before a window, and position ids."""

    def __init__(self, columns: Columns, dtype: torch.dtype):
        self.columns = columns
        self.dtype = dtype
        self._pads: Tensor | None = None  # [B, 1] int64 on the device
        self._column_positions: Tensor | None = None  # [B, C] int64, of each row's columns
        self._border: tuple[Tensor, Tensor] | None = None  # -inf and 0

    def forget(self) -> None:
        """To be called after rows have left or joined."""
        self._pads = self._column_positions = None

    def padding(self) -> Tensor:
        """[B, T + Q] int64: 1 for real tokens, of which the coming ones are the last."""
        return (self.columns.row_lens.ruler.span(0, self.columns.end) >= self._pads_on_device()).to(torch.int64)

    def positions(self, num_query: int) -> Tensor:
        """[B or 1, Q] int64: real tokens before each of the next ones; negative in padding."""
        coming = self.columns.coming
        if coming.positions is None:
            coming.positions = coming.lens.positions(coming.num_tokens, pads=self._pads_if_any())
        return coming.positions[:, coming.num_done : coming.num_done + num_query]

    def mask(self, window: int | None) -> Tensor:
        """[B or 1, 1, Q, T] additive: 0 where a query sees a column, -inf elsewhere; without a window it sees all."""
        columns, coming = self.columns, self.columns.coming
        made = coming.masks.get(window)
        row = coming.num_done - (0 if made is None else made.first_token)
        if made is None or row + columns.num_query > made.values.shape[2]:
            made, row = self._make_mask(window), 0
            coming.masks[window] = made
        first = columns.first_seen(window) - made.first_column
        return made.values[:, :, row : row + columns.num_query, first : columns.end - made.first_column]

    def _make_mask(self, window: int | None) -> Mask:
        columns, coming = self.columns, self.columns.coming
        is_ragged = any(columns.pads) or not columns.is_even
        num_tokens = coming.num_left if is_ragged else columns.num_query  # later queries of even rows need none
        first = columns.first_seen(window)
        width = -(-(columns.num_held + num_tokens - first) // MASK_UNIT) * MASK_UNIT
        seen = self._positions_of(first, width)[:, None]  # [B or 1, 1, W]
        at = self.positions(num_tokens)[:, :, None]  # [B or 1, N, 1]
        is_hidden = seen > at
        if window is not None:
            is_hidden = is_hidden | (seen <= at - window)
        if self._border is None:
            self._border = (
                torch.full((), -torch.inf, dtype=self.dtype, device=columns.device),
                torch.zeros((), dtype=self.dtype, device=columns.device),
            )
        return Mask(torch.where(is_hidden, *self._border)[:, None], coming.num_done, first)

    def _positions_of(self, first: int, width: int) -> Tensor:
        """[B or 1, W] int64: of a range of columns; those of padding come after all tokens."""
        ruler, end = self.columns.row_lens.ruler, first + width
        if not any(self.columns.pads):
            return ruler.span(first, width)[None]
        if self._column_positions is None or self._column_positions.shape[1] < end:
            positions = ruler.span(0, 2 * end) - self._pads_on_device()
            self._column_positions = positions.masked_fill_(positions < 0, _PADDING)
        return self._column_positions[:, first:end]

    def _pads_if_any(self) -> Tensor | None:
        return self._pads_on_device() if any(self.columns.pads) else None

    def _pads_on_device(self) -> Tensor:
        if self._pads is None:
            self._pads = upload(self.columns.pads, self.columns.device)[:, None]
        return self._pads


def additive_mask(places: Tensor, seen: Tensor, pads: Tensor | None, window: int | None, dtype: torch.dtype) -> Tensor:
    """[B or 1, 1, Q, T]: 0 where the query at a column of `places` [B or 1, Q] sees one of `seen` [T], -inf elsewhere.

    A row's first `pads` [B] columns are padding; a query sees `window` tokens, itself among them, or all.
    """
    at = places[:, :, None]
    is_hidden = seen > at
    if window is not None:
        is_hidden = is_hidden | (seen <= at - window)
    if pads is not None:
        is_hidden = is_hidden | (seen < pads[:, None, None])
    return additive(is_hidden, dtype)


def additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, N, T]: -inf where [B, N, T] bool is set, 0 elsewhere."""
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, -torch.inf)[:, None]
