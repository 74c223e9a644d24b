"""Positions in three axes, time, height and width (M-RoPE), of the tokens of a draft head's rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_speculate.rows.per_row import PerRow


class RowAxes(PerRow):
    """Maps the tokens of B rows, which a head counts from 0, to the target's positions.

    A token of the prompt has the position that the target gave it. One after the prompt is as many steps behind the
    prompt's last token, on every axis, as there are tokens from there to it.

    Source:
        M-RoPE: Wang et al., "Qwen2-VL" (arXiv:2409.12191), section 2.1.
    """

    TENSORS = ("_prompts", "_pads", "offsets")

    def __init__(self, prompts: Tensor, num_pads: Sequence[int], device: torch.device):
        """Keep the positions of prompts [1 or 3, B, T] int64, of which `num_pads` [B] columns are padding."""
        self._prompts = prompts.expand(3, -1, -1).transpose(0, 1).to(device)  # [B, 3, T]
        self._pads = torch.tensor(num_pads, device=device)[:, None]  # [B, 1]
        num_tokens = self._prompts.shape[2] - self._pads  # [B, 1]
        # [B, 3], the positions of later tokens less their numbers
        self.offsets = self._prompts[:, :, -1] - (num_tokens - 1)

    def at(self, numbers: Tensor) -> Tensor:
        """[3, B, N] int64, the positions of the tokens with these numbers [B or 1, N] int64 in each row."""
        columns, last = numbers + self._pads, self._prompts.shape[2] - 1  # [B, N]
        read = self._prompts.gather(2, columns.clamp_max(last)[:, None].expand(-1, 3, -1))  # [B, 3, N]
        later = (numbers[:, None] + self.offsets[:, :, None]).expand_as(read)
        return torch.where((columns > last)[:, None], later, read).transpose(0, 1)
