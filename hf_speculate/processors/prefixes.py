"""The prefixes of a round: each row's own ids, then the first few of its drafted tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_speculate.transfers import upload


@dataclass
class Prefixes:
    """The prefixes of all (row, position) pairs; a pair's flat index is row * (K+1) + position."""

    input_ids: Tensor  # [B, T] int64, right-padded
    draft_token_ids: Tensor  # [B, K] int64, all in the vocabulary
    lens: Sequence[int]  # B lengths in 0..T, of the rows without drafted tokens

    @property
    def num_positions(self) -> int:
        return self.draft_token_ids.shape[1] + 1

    @cached_property
    def is_even(self) -> bool:
        return min(self.lens) == max(self.lens)

    @cached_property
    def shifts(self) -> Tensor:
        """[B, 1] int64, how many tokens each row is shorter than the longest."""
        return upload([max(self.lens) - prefix_len for prefix_len in self.lens], self.input_ids.device)[:, None]

    @cached_property
    def full_ids(self) -> Tensor:
        """[B, T'+K] int64: each row, then its drafted tokens; T' is the longest row. The rest is not to be read."""
        drafts = self.draft_token_ids.to(self.input_ids)
        full_ids = torch.cat([self.input_ids[:, : max(self.lens)], drafts], dim=1)  # [B, T'+K]
        if self.is_even:
            return full_ids
        slots = max(self.lens) - self.shifts + torch.arange(drafts.shape[1], device=drafts.device)  # [B, K]
        return full_ids.scatter_(1, slots, drafts)

    def align(self, fill: Tensor | int) -> Tensor:
        """[B, T'+K] int64, `fill` before each row, so that position j of every row ends at column T'+j."""
        if self.is_even:
            return self.full_ids
        places = torch.arange(self.full_ids.shape[1], device=self.full_ids.device) - self.shifts  # [B, T'+K]
        return torch.where(places < 0, fill, self.full_ids.gather(1, places.clamp(min=0)))

    def group_by(self, key: Callable[[int], int]) -> dict[int, list[int]]:
        """The flat indices of all pairs, by a number derived from their prefix lengths."""
        groups: dict[int, list[int]] = {}
        for flat_index in range(len(self.lens) * self.num_positions):
            groups.setdefault(key(self.len_of(flat_index)), []).append(flat_index)
        return groups

    def len_of(self, flat_index: int) -> int:
        row, position = divmod(flat_index, self.num_positions)
        return self.lens[row] + position

    def take_last(self, flat_indices: Sequence[int], num_ids: int) -> Tensor:
        """[N, n] int64, new, the last n ids of the named pairs' prefixes, which are that long at least."""
        corners = [[index // self.num_positions, self.len_of(index) - num_ids] for index in flat_indices]
        rows, starts = upload(corners, self.input_ids.device)[:, :, None].unbind(dim=1)  # [N, 1] each
        return self.full_ids[rows, starts + torch.arange(num_ids, device=rows.device)]  # [N, n]
