"""Row lengths on the host and on a device, and the column indices derived from them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.rows.per_row import PerRow, RowIndices
from hf_speculate.transfers import upload

# integers that a cache holds beyond those asked for first; they double when they are exceeded
_FIRST_VALUES = 512


class SpanLess(NamedTuple):
    """Consecutive integers less the padding of each row."""

    pads: Tensor  # [B, 1]
    first: int  # the first integer, before the padding is subtracted
    values: Tensor  # [B, N]

    def holds(self, start: int, num: int) -> bool:
        return self.first <= start <= self.first + self.values.shape[1] - num


class ArangeCache:
    """Consecutive integers on a device, shared as views."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype = torch.int64):
        self.device = torch.device(device)
        self.dtype = dtype
        self._first = self._end = 0
        self._values: Tensor | None = None  # [N], the integers from `_first` to before `_end`
        self._less: SpanLess | None = None  # the newest result of `span_less`

    def span(self, start: int, num_values: int) -> Tensor:
        """Return a read-only view of `num_values` integers from `start` on."""
        end = start + num_values
        if self._values is None or start < self._first or end > self._end:
            self._first = (
                self._first if start >= self._first else min(start, 2 * self._first, -_FIRST_VALUES)
            )
            self._end = self._end if end <= self._end else max(end + _FIRST_VALUES, 2 * self._end)
            self._values = torch.arange(
                self._first, self._end, dtype=self.dtype, device=self.device
            )
        return self._values[start - self._first : end - self._first]

    def span_less(self, start: int, num: int, pads: Tensor) -> Tensor:
        """Return [B, num], the integers of `span` less pads [B, 1], read-only.

        They are made for several spans at once.
        """
        self.span(start, num)  # extends the numbers if it must
        if self._less is None or self._less.pads is not pads or not self._less.holds(start, num):
            width = min(max(num, _FIRST_VALUES), self._end - start)
            self._less = SpanLess(pads, start, self.span(start, width) - pads)
        first = start - self._less.first
        return self._less.values[:, first : first + num]


class RowCounts(NamedTuple):
    """A count for each of B rows."""

    on_host: Sequence[int]  # [B]
    # [B] int32 or int64, the counts minus `common`; None if not on the device
    per_row: Tensor | None = None
    common: int = 0


class RowLens(PerRow):
    """Lengths of B rows, on host and device.

    Decisions read the host's numbers, arithmetic a tensor on the device. There a length is an entry
    of the tensor plus a number shared by all rows, so adding one count to all rows launches no
    kernel. The tensor is uploaded when it is next read, without a wait, unless the counts are on
    the device already.
    """

    BY_ROW = ("on_host",)

    def __init__(self, lens: Sequence[int], aranges: ArangeCache):
        self.on_host = list(lens)
        self.aranges = aranges
        self._per_row: Tensor | None = None  # [B] int64
        self._common = 0
        # Lengths whose tensor is shared when it is read; their numbers, and the difference to them
        self._like: tuple[RowLens, list[int], int] | None = None

    @property
    def is_even(self) -> bool:
        return all(length == self.on_host[0] for length in self.on_host)

    @property
    def is_on_device(self) -> bool:
        """Whether the device holds the lengths, because they were read there before."""
        return self._per_row is not None

    def copy(self) -> "RowLens":
        """Return a copy, independent of later changes."""
        row_lens = RowLens(self.on_host, self.aranges)
        row_lens._per_row, row_lens._common = self._per_row, self._common
        row_lens._like = self._like
        return row_lens

    def on_device(self) -> Tensor:
        """Return the lengths as a tensor [B] int64."""
        if self.is_even:
            length = self.on_host[0] if self.on_host else 0
            return torch.full(
                (len(self.on_host),), length, dtype=torch.int64, device=self.aranges.device
            )
        return self._tensor() + self._common

    def summands(self) -> tuple[Tensor, Tensor]:
        """Return two read-only tensors [B] int64 whose sum is the lengths, without a kernel."""
        num_rows = len(self.on_host)
        per_row = self.aranges.span(0, 1) if self.is_even else self._tensor()
        common = self.on_host[0] if self.is_even and self.on_host else self._common
        return per_row.expand(num_rows), self.aranges.span(common, 1).expand(num_rows)

    def less(self, other: "RowLens") -> tuple[Tensor, int]:
        """Subtract other lengths: return [B] int64 on the device, and a number to add to each."""
        if other.is_even:
            return self._tensor(), self._common - other.on_host[0]
        if self.is_even:
            return -other._tensor(), self.on_host[0] - other._common
        mine, theirs = self._tensor(), other._tensor()
        return mine - theirs, self._common - other._common

    def columns(self, num_tokens: int, offset: int = 0) -> Tensor:
        """Return the columns of `num_tokens` tokens from each row's end plus `offset` on.

        Returns:
            [B or 1, num_tokens] int64, read-only.
        """
        if self.is_even:
            return self.aranges.span((self.on_host[0] if self.on_host else 0) + offset, num_tokens)[
                None
            ]
        per_row = self._tensor()[:, None]  # may change `_common`
        return per_row + self.aranges.span(self._common + offset, num_tokens)

    def positions(self, num_tokens: int, offset: int = 0, pads: Tensor | None = None) -> Tensor:
        """Return `columns` minus the padding `pads` [B, 1], in new memory, safe to pass to models.

        Returns:
            [B or 1, num_tokens] int64.
        """
        if pads is not None and not self.is_even:
            per_row = self._tensor()[:, None]  # may change `_common`
            return per_row + self.aranges.span_less(self._common + offset, num_tokens, pads)
        if pads is not None:
            return self.columns(num_tokens, offset) - pads
        if self.is_even:
            first = self.on_host[0] + offset
            return torch.arange(first, first + num_tokens, device=self.aranges.device)[None]
        return self.columns(num_tokens, offset)

    def add(self, num_tokens: int) -> None:
        """Lengthen all rows by `num_tokens`; a negative number shortens them."""
        self.on_host = [length + num_tokens for length in self.on_host]
        self._common += num_tokens
        if self._like is not None:
            like, numbers, gap = self._like
            self._like = like, numbers, gap + num_tokens

    def add_counts(self, counts: RowCounts | Sequence[int]) -> None:
        if not isinstance(counts, RowCounts):
            counts = RowCounts(counts)
        was_even, before, self._like = self.is_even, self.on_host, None
        self.on_host = [
            length + count for length, count in zip(before, counts.on_host, strict=True)
        ]
        if counts.per_row is None or self.is_even:
            self._per_row = None
        elif was_even:
            self._per_row, self._common = counts.per_row.to(torch.int64), before[0] + counts.common
        elif self._per_row is not None:
            self._per_row, self._common = (
                self._per_row + counts.per_row,
                self._common + counts.common,
            )

    def set(self, lens: Sequence[int], like: "RowLens | None" = None) -> None:
        """Replace the lengths [B].

        If all differ from `like` by the same number, its tensor on the device is shared.
        """
        self.on_host, self._per_row, self._like = list(lens), None, None
        if like is None or like.aranges.device != self.aranges.device:
            return
        gaps = {
            length - like_length
            for length, like_length in zip(self.on_host, like.on_host, strict=True)
        }
        if len(gaps) == 1:
            self._like = like, like.on_host, gaps.pop()

    def rows(self, indices: Sequence[int]) -> None:
        row_indices, per_row = RowIndices.of(indices), self._per_row
        super().rows(row_indices)
        if per_row is not None and not self.is_even:
            self._per_row = row_indices.select(per_row)

    def forget(self) -> None:
        self._per_row = self._like = None

    def _tensor(self) -> Tensor:
        """Return the lengths minus `_common`, [B] int64."""
        if self._per_row is None and self._like is not None:
            like, numbers, gap = self._like
            if like.on_host is numbers:  # unchanged since
                self._per_row, self._common = like._tensor(), like._common + gap
        if self._per_row is None:
            self._common = min(self.on_host)
            self._per_row = upload(
                [length - self._common for length in self.on_host], self.aranges.device
            )
        return self._per_row
