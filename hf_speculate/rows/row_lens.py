"""Row lengths, on the host and on a device, and the column indices that follow from them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.rows.per_row import PerRow, RowIndices
from hf_speculate.transfers import upload

_FIRST_VALUES = 512  # numbers that a cache has at first; they double


class SpanLess(NamedTuple):
    """Consecutive integers less the padding of each row."""

    pads: Tensor  # [B, 1]
    first: int  # of the integers
    values: Tensor  # [B, N]

    def holds(self, start: int, num: int) -> bool:
        return self.first <= start <= self.first + self.values.shape[1] - num


class ArangeCache:
    """Consecutive integers on a device, made once and handed out as views."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype = torch.int64):
        self.device = torch.device(device)
        self.dtype = dtype
        self._first = self._end = 0
        self._values: Tensor | None = None  # [N], the numbers from the first to before the end
        self._less: SpanLess | None = None  # what `span_less` has made last

    def span(self, start: int, num: int) -> Tensor:
        """[num], the numbers from `start` on; not to be written to."""
        end = start + num
        if self._values is None or start < self._first or end > self._end:
            self._first = self._first if start >= self._first else min(start, 2 * self._first, -_FIRST_VALUES)
            self._end = self._end if end <= self._end else max(end, 2 * self._end, _FIRST_VALUES)
            self._values = torch.arange(self._first, self._end, dtype=self.dtype, device=self.device)
        return self._values[start - self._first : end - self._first]

    def span_less(self, start: int, num: int, pads: Tensor) -> Tensor:
        """[B, num], the numbers of `span` less pads [B, 1], made for several spans at once; not to be written to."""
        self.span(start, num)  # extends the numbers if it must
        if self._less is None or self._less.pads is not pads or not self._less.holds(start, num):
            width = min(max(num, _FIRST_VALUES), self._end - start)
            self._less = SpanLess(pads, start, self.span(start, width) - pads)
        first = start - self._less.first
        return self._less.values[:, first : first + num]


class RowCounts(NamedTuple):
    """A count for each of B rows."""

    on_host: Sequence[int]  # [B]
    per_row: Tensor | None = None  # [B] int32 or int64 on the device, the counts less `common`; None if it lacks them
    common: int = 0


class RowLens(PerRow):
    """Lengths of B rows: numbers on the host for decisions, a tensor on a device for arithmetic.

    On the device a length is an entry of a tensor plus a number that all rows share, so adding the same count to all
    rows launches nothing. The tensor is uploaded when it is next read, without a wait, unless counts are there.
    """

    BY_ROW = ("on_host",)

    def __init__(self, lens: Sequence[int], aranges: ArangeCache):
        self.on_host = list(lens)
        self.aranges = aranges
        self._per_row: Tensor | None = None  # [B] int64
        self._common = 0

    @property
    def is_even(self) -> bool:
        return all(length == self.on_host[0] for length in self.on_host)

    def copy(self) -> "RowLens":
        """Return the present lengths, which stay as they are."""
        twin = RowLens(self.on_host, self.aranges)
        twin._per_row, twin._common = self._per_row, self._common
        return twin

    def on_device(self) -> Tensor:
        """[B] int64."""
        if self.is_even:
            length = self.on_host[0] if self.on_host else 0
            return torch.full((len(self.on_host),), length, dtype=torch.int64, device=self.aranges.device)
        return self._tensor() + self._common

    def less(self, other: "RowLens") -> tuple[Tensor, int]:
        """These lengths less the other ones: [B] int64 on the device, and a number to add to each."""
        if other.is_even:
            return self._tensor(), self._common - other.on_host[0]
        if self.is_even:
            return -other._tensor(), self.on_host[0] - other._common
        mine, theirs = self._tensor(), other._tensor()
        return mine - theirs, self._common - other._common

    def columns(self, num: int, offset: int = 0) -> Tensor:
        """[B or 1, num] int64: columns of `num` tokens from each row's end plus `offset` on; not to be written to."""
        if self.is_even:
            return self.aranges.span((self.on_host[0] if self.on_host else 0) + offset, num)[None]
        per_row = self._tensor()[:, None]  # may set what rows share
        return per_row + self.aranges.span(self._common + offset, num)

    def positions(self, num: int, offset: int = 0, pads: Tensor | None = None) -> Tensor:
        """[B or 1, num] int64: `columns` less the padding [B, 1], in memory of their own: models are handed them."""
        if pads is not None and not self.is_even:
            per_row = self._tensor()[:, None]  # may set what rows share
            return per_row + self.aranges.span_less(self._common + offset, num, pads)
        if pads is not None:
            return self.columns(num, offset) - pads
        if self.is_even:
            first = self.on_host[0] + offset
            return torch.arange(first, first + num, device=self.aranges.device)[None]
        return self.columns(num, offset)

    def add(self, num: int) -> None:
        """Lengthen all rows by `num`; shorten them where it is negative."""
        self.on_host = [length + num for length in self.on_host]
        self._common += num

    def add_counts(self, counts: RowCounts | Sequence[int]) -> None:
        if not isinstance(counts, RowCounts):
            counts = RowCounts(counts)
        was_even, before = self.is_even, self.on_host
        self.on_host = [length + num for length, num in zip(before, counts.on_host, strict=True)]
        if counts.per_row is None or self.is_even:
            self._per_row = None
        elif was_even:
            self._per_row, self._common = counts.per_row.to(torch.int64), before[0] + counts.common
        elif self._per_row is not None:
            self._per_row, self._common = self._per_row + counts.per_row, self._common + counts.common

    def set(self, lens: Sequence[int], like: "RowLens | None" = None) -> None:
        """Take other lengths [B]; if all differ from `like` by one number, its tensor on the device is used."""
        self.on_host, self._per_row = list(lens), None
        if like is None or like._per_row is None or like.aranges.device != self.aranges.device:
            return
        gaps = {length - like_length for length, like_length in zip(self.on_host, like.on_host, strict=True)}
        if len(gaps) == 1:
            self._per_row, self._common = like._per_row, like._common + gaps.pop()

    def rows(self, indices: Sequence[int]) -> None:
        kept, per_row = RowIndices.of(indices), self._per_row
        super().rows(kept)
        if per_row is not None and not self.is_even:
            self._per_row = kept.select(per_row)

    def forget(self) -> None:
        self._per_row = None

    def _tensor(self) -> Tensor:
        """[B] int64, the lengths less what rows share."""
        if self._per_row is None:
            self._common = min(self.on_host)
            self._per_row = upload([length - self._common for length in self.on_host], self.aranges.device)
        return self._per_row
