"""Token buffer: rows of token ids with different lengths in one growing tensor."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_speculate.rows.per_row import PerRow
from hf_speculate.rows.row_lens import ArangeCache, RowCounts, RowLens


class TokenBuffer(PerRow):
    """B rows of token ids, each with its own length, that begin with copies of `token_ids` [B, T] int64."""

    TENSORS = ("token_ids",)
    PARTS = ("row_lens",)

    def __init__(self, token_ids: Tensor, capacity: int = 0):
        batch_size, length = token_ids.shape
        self.token_ids = token_ids.new_zeros(batch_size, max(capacity, length))  # [B, C] int64
        self.token_ids[:, :length] = token_ids
        self.row_lens = RowLens([length] * batch_size, ArangeCache(token_ids.device))
        # [B, N] int64, the last tokens of each row, gathered at these lengths: each change makes a new list
        self._gathered: tuple[list[int], Tensor] | None = None

    @property
    def lens(self) -> list[int]:
        return self.row_lens.on_host

    @property
    def is_even(self) -> bool:
        return self.row_lens.is_even

    def append(self, token_ids: Tensor, counts: RowCounts | Sequence[int] | None = None) -> None:
        """Write tokens [B, N] int64 at the end of each row: the first `counts` [B] of each, or all N."""
        num = token_ids.shape[1]
        self._reserve(max(self.lens, default=0) + num)
        if self.is_even:
            start = self.lens[0] if self.lens else 0
            torch.clamp_min(token_ids, 0, out=self.token_ids[:, start : start + num])
        else:
            self.token_ids.scatter_(1, self.row_lens.columns(num), token_ids.clamp_min(0))
        if counts is None:
            self.row_lens.add(num)
        else:
            self.row_lens.add_counts(counts)

    def last(self, num: int) -> Tensor:
        """[B, num] int64, the last `num` tokens of each row; a shorter row repeats its first one before them."""
        if self.is_even and num <= self.lens[0]:
            return self.token_ids[:, self.lens[0] - num : self.lens[0]]
        if self._gathered is None or self._gathered[0] is not self.lens or self._gathered[1].shape[1] < num:
            columns = self.row_lens.columns(num, offset=-num).expand(len(self.lens), -1)
            ids = self.token_ids.gather(1, columns if num <= min(self.lens) else columns.clamp_min(0))
            self._gathered = self.lens, ids
        ids = self._gathered[1]
        return ids[:, ids.shape[1] - num :]

    def copy(self) -> "TokenBuffer":
        """Return the same rows; what either drops of them stays in the other, and neither is appended to."""
        twin = copy.copy(self)
        twin.row_lens = self.row_lens.copy()
        return twin

    def drop(self, num: int) -> None:
        self.row_lens.add(-num)

    def join(self, other: "TokenBuffer") -> None:
        self._reserve(other.token_ids.shape[1])
        other.token_ids = pad(other.token_ids, (0, self.token_ids.shape[1] - other.token_ids.shape[1]))
        super().join(other)

    def _reserve(self, num_columns: int) -> None:
        batch_size, capacity = self.token_ids.shape
        if num_columns > capacity:
            more = self.token_ids.new_zeros(batch_size, max(num_columns - capacity, capacity))
            self.token_ids = torch.cat([self.token_ids, more], dim=1)
