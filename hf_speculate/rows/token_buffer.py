"""Token buffer: rows of token ids with different lengths in one growing tensor."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_speculate.rows.per_row import PerRow
from hf_speculate.rows.row_lens import ArangeCache, RowCounts, RowLens
from hf_speculate.transfers import upload


class TokenBuffer(PerRow):
    """B rows of token ids with different lengths.

    The rows start as copies of `token_ids` [B, T] int64.
    """

    TENSORS = ("token_ids",)
    PARTS = ("row_lens",)

    def __init__(self, token_ids: Tensor, capacity: int = 0):
        batch_size, length = token_ids.shape
        self._token_ids = token_ids.new_zeros(batch_size, max(capacity, length))
        self._token_ids[:, :length] = token_ids
        self._pending: list[list[int]] = []  # [B] tokens not uploaded yet; empty if there are none
        self.row_lens = RowLens([length] * batch_size, ArangeCache(token_ids.device))
        # [B, N] int64, the last tokens of each row, and the lengths at which they were gathered;
        # each change of the lengths makes a new list
        self._gathered: tuple[list[int], Tensor] | None = None

    @property
    def token_ids(self) -> Tensor:
        """[B, C] int64; columns past a row's end are undefined."""
        if self._pending:
            self._upload_pending()
        return self._token_ids

    @token_ids.setter
    def token_ids(self, token_ids: Tensor) -> None:
        self._token_ids = token_ids

    @property
    def lens(self) -> list[int]:
        return self.row_lens.on_host

    @property
    def is_even(self) -> bool:
        return self.row_lens.is_even

    def append(self, token_ids: Tensor, counts: RowCounts | Sequence[int] | None = None) -> None:
        """Append tokens to each row.

        Args:
            token_ids: [B, N] int64.
            counts: [B] number of tokens to append to each row. None for all N.
        """
        num_tokens = token_ids.shape[1]
        if self._pending:
            self._upload_pending()
        self._reserve(max(self.lens, default=0) + num_tokens)
        if self.is_even:
            start = self.lens[0] if self.lens else 0
            torch.clamp_min(token_ids, 0, out=self.token_ids[:, start : start + num_tokens])
        else:
            self.token_ids.scatter_(1, self.row_lens.columns(num_tokens), token_ids.clamp_min(0))
        if counts is None:
            self.row_lens.add(num_tokens)
        else:
            self.row_lens.add_counts(counts)

    def append_later(self, new_ids: Sequence[list[int]], num_new: RowCounts) -> None:
        """Append tokens from the host, which are uploaded when `token_ids` is next read.

        Args:
            new_ids: [B] list of the new tokens of each row.
            num_new: [B] number of new tokens in each row.
        """
        if not self._pending:
            self._pending = [[] for _ in new_ids]
        for ids, more in zip(self._pending, new_ids, strict=True):
            ids.extend(more)
        self.row_lens.add_counts(num_new)

    def know_last(self, token_ids: Tensor | None) -> None:
        """Take over each row's last tokens from another tensor on the device.

        Args:
            token_ids: [B, N] int64, valid until the lengths change. None if the tensor has been
                overwritten.
        """
        self._gathered = None if token_ids is None else (self.lens, token_ids)

    def last(self, num_tokens: int) -> Tensor:
        """Return the last `num_tokens` tokens of each row, [B, num_tokens] int64.

        A shorter row is padded on the left with its first token.
        """
        gathered = self._gathered
        if gathered is None or gathered[0] is not self.lens or gathered[1].shape[1] < num_tokens:
            if self.is_even and num_tokens <= self.lens[0]:
                return self.token_ids[:, self.lens[0] - num_tokens : self.lens[0]]
            columns = self.row_lens.columns(num_tokens, offset=-num_tokens).expand(
                len(self.lens), -1
            )
            ids = self.token_ids.gather(
                1, columns if num_tokens <= min(self.lens) else columns.clamp_min(0)
            )
            gathered = self._gathered = self.lens, ids
        num_surplus = gathered[1].shape[1] - num_tokens
        return gathered[1][:, num_surplus:] if num_surplus else gathered[1]

    def copy(self) -> "TokenBuffer":
        """Return a copy with separate lengths and shared tokens; append to neither buffer."""
        if self._pending:
            self._upload_pending()
        token_buffer = copy.copy(self)
        token_buffer.row_lens = self.row_lens.copy()
        return token_buffer

    def drop(self, num_tokens: int) -> None:
        """Drop the last `num_tokens` tokens of each row."""
        if self._pending:
            self._upload_pending()
        self.row_lens.add(-num_tokens)

    def join(self, other: "TokenBuffer") -> None:
        self._reserve(other.token_ids.shape[1])
        other.token_ids = pad(
            other.token_ids, (0, self.token_ids.shape[1] - other.token_ids.shape[1])
        )
        super().join(other)

    def _upload_pending(self) -> None:
        pending, self._pending = self._pending, []
        width, lens = max(map(len, pending)), self.lens
        starts = [length - len(ids) for length, ids in zip(lens, pending, strict=True)]
        self._reserve(max(starts) + width)
        rows = [
            [start, *ids, *[0] * (width - len(ids))]
            for start, ids in zip(starts, pending, strict=True)
        ]
        uploaded = upload(rows, self._token_ids.device)  # [B, 1 + W]
        columns = uploaded[:, :1] + self.row_lens.aranges.span(0, width)
        self._token_ids.scatter_(1, columns, uploaded[:, 1:])

    def _reserve(self, num_columns: int) -> None:
        batch_size, capacity = self._token_ids.shape
        if num_columns > capacity:
            more = self._token_ids.new_zeros(batch_size, max(num_columns - capacity, capacity))
            self._token_ids = torch.cat([self._token_ids, more], dim=1)
