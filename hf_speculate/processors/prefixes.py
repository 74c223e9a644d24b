"""Prefixes: the ids visible to a logits processor at each position of a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_speculate.transfers import upload


@dataclass
class Prefixes:
    """Prefixes for all pairs of a row and a position.

    There are N = B * (K+1) pairs. The index of a pair is row * (K+1) + position.
    """

    input_ids: Tensor  # [B, T] int64, right-padded
    draft_token_ids: Tensor  # [B, K] int64, all in the vocabulary
    row_lens: Sequence[int]  # [B] lengths in 0..T, without drafted tokens

    @property
    def num_positions(self) -> int:
        return self.draft_token_ids.shape[1] + 1

    @cached_property
    def lens(self) -> list[int]:
        """[N] length of each prefix."""
        return [
            row_len + position
            for row_len in self.row_lens
            for position in range(self.num_positions)
        ]

    @cached_property
    def full_ids(self) -> Tensor:
        """[B, T'+K] int64: the ids of each row, followed by its drafted tokens and undefined ids.

        T' is the length of the longest row.
        """
        drafts, longest = self.draft_token_ids.to(self.input_ids), max(self.row_lens)
        full_ids = torch.cat([self.input_ids[:, :longest], drafts], dim=1)  # [B, T'+K]
        if min(self.row_lens) == longest:
            return full_ids
        ends = upload(self.row_lens, drafts.device)[:, None]
        return full_ids.scatter_(
            1, ends + torch.arange(drafts.shape[1], device=drafts.device), drafts
        )

    def last_ids(self, pairs: Sequence[int], num_ids: int, fill: int | None = None) -> Tensor:
        """Return the last `num_ids` ids of each pair's prefix, as a new tensor [M, n] int64.

        Args:
            pairs: [M] indices of pairs.
            num_ids: n; shorter prefixes are padded on the left.
            fill: padding id for shorter prefixes; None for the first id of the row.
        """
        if (
            self.num_positions == 1
            and len(pairs) == len(self.lens)
            and min(self.lens) == max(self.lens) >= num_ids
        ):
            return self.full_ids[:, self.lens[0] - num_ids :].clone()  # avoids uploading indices
        corners = [[pair // self.num_positions, self.lens[pair] - num_ids] for pair in pairs]
        # [M, 1] each
        rows, starts = upload(corners, self.input_ids.device)[:, :, None].unbind(dim=1)
        columns = starts + torch.arange(num_ids, device=rows.device)  # [M, n]
        ids = self.full_ids[rows, columns.clamp(min=0)]
        return ids if fill is None else ids.masked_fill(columns < 0, fill)
