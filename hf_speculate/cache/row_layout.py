"""Row layout in preallocated buffers: the first and last column of each row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_speculate.rows.per_row import PerRow
from hf_speculate.rows.row_lens import ArangeCache, RowLens
from hf_speculate.transfers import upload

_PADDING = torch.iinfo(torch.int64).max  # position of padding columns, after all tokens


class RowLayout(PerRow):
    """Padding and length of each row, in columns.

    The buffers of all layers share one layout.
    """

    BY_ROW = ("pads",)
    PARTS = ("row_lens",)

    def __init__(
        self,
        pads: Sequence[int],  # [B] number of padding columns before each row's first token
        max_columns: int | None = None,
        capacity: int | None = None,  # number of columns of fixed buffers; None if buffers grow
        device: torch.device | str = "cpu",
    ):
        self.pads = list(pads)
        self.row_lens = RowLens([0] * len(self.pads), ArangeCache(device))
        self.max_columns = max_columns
        self.capacity = capacity
        self._pads: Tensor | None = None  # see `pads_on_device`
        self._positions: Tensor | None = None  # [B, C] int64, position of each column

    @property
    def lens(self) -> list[int]:
        """[B] number of columns in each row, including padding."""
        return self.row_lens.on_host

    @property
    def device(self) -> torch.device:
        return self.row_lens.aranges.device

    @property
    def is_even(self) -> bool:
        return self.row_lens.is_even

    @property
    def num_columns(self) -> int:
        """Number of columns of the longest row."""
        return max(self.lens, default=0)

    def drop_padding(self) -> int:
        """Drop the leading columns that are padding in all rows, and return their number."""
        surplus = self.skip_padding() if self.num_columns else 0
        self.row_lens.add(-surplus)
        return surplus

    def skip_padding(self) -> int:
        """Forget the padding common to all rows, and return its number of columns."""
        surplus = min(self.pads, default=0)
        self.pads = [pad - surplus for pad in self.pads]
        if self.max_columns is not None:
            self.max_columns -= surplus
        self.forget()
        return surplus

    def join(self, other: "RowLayout") -> None:
        bounds = self.max_columns, other.max_columns
        self.max_columns = (
            None if None in bounds else max(bound for bound in bounds if bound is not None)
        )
        super().join(other)

    def forget(self) -> None:
        self._pads = self._positions = None

    def pads_on_device(self) -> Tensor | None:
        """Return the padding on the device, [B, 1] int64; None without padding."""
        if self._pads is None and any(self.pads):
            self._pads = upload(self.pads, self.device)[:, None]
        return self._pads

    def padding_mask(self, num_columns: int) -> Tensor | None:
        """Return the mask [B, num_columns] int64, 1 for real tokens; None without padding."""
        pads = self.pads_on_device()
        return (
            None
            if pads is None
            else (self.row_lens.aranges.span(0, num_columns) >= pads).to(torch.int64)
        )

    def positions(self, first: int, width: int) -> Tensor:
        """Return the positions of a range of columns, [B or 1, W] int64.

        The position of padding is larger than the position of any token.
        """
        aranges, end, pads = self.row_lens.aranges, first + width, self.pads_on_device()
        if pads is None:
            return aranges.span(first, width)[None]
        if self._positions is None or self._positions.shape[1] < end:
            positions = aranges.span(0, 2 * end) - pads
            self._positions = positions.masked_fill_(positions < 0, _PADDING)
        return self._positions[:, first:end]
