"""Three-axis positions (M-RoPE: time, height, width) for a draft head's rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_speculate.rows.per_row import PerRow


class RowAxes(PerRow):
    """Target positions of the tokens of B rows.

    A head numbers the tokens of a row from 0. Prompt tokens have the target's positions. After the
    prompt, positions increase by 1 per token on every axis.

    Source:
        M-RoPE: Wang et al., "Qwen2-VL" (arXiv:2409.12191), section 2.1.
    """

    TENSORS = ("_prompts", "_pads", "offsets")

    def __init__(self, prompts: Tensor, num_pads: Sequence[int], device: torch.device):
        """Store the positions [1 or 3, B, T] int64 of prompts with `num_pads` [B] pad columns."""
        self._prompts = prompts.expand(3, -1, -1).transpose(0, 1).to(device)  # [B, 3, T]
        self._pads = torch.tensor(num_pads, device=device)[:, None]  # [B, 1]
        num_tokens = self._prompts.shape[2] - self._pads  # [B, 1]
        # [B, 3], positions minus token numbers for tokens after the prompt
        self.offsets = self._prompts[:, :, -1] - (num_tokens - 1)

    def at(self, numbers: Tensor) -> Tensor:
        """Return the positions [3, B, N] int64 of tokens with `numbers` [B or 1, N] int64."""
        columns, last = numbers + self._pads, self._prompts.shape[2] - 1  # [B, N]
        # [B, 3, N]
        read = self._prompts.gather(2, columns.clamp_max(last)[:, None].expand(-1, 3, -1))
        later = (numbers[:, None] + self.offsets[:, :, None]).expand_as(read)
        return torch.where((columns > last)[:, None], later, read).transpose(0, 1)
