"""Helpers for the drop-in functions: draw seeds, and mask tokens from invalid rows."""

import torch
from torch import Tensor

from ..types import Verdict


def mask_undefined_draws(verdict: Verdict, logits: Tensor) -> Tensor:
    """Return the verdict's ids [B, K+1], with -1 where a row of `logits` is not a distribution.

    The logits are [B, K+1, V].
    """
    at = verdict.num_accepted.to(torch.int64)
    tops = logits[torch.arange(logits.shape[0], device=logits.device), at].amax(-1)  # [B]
    here = at.unsqueeze(-1)
    drawn = verdict.token_ids.gather(1, here)
    return verdict.token_ids.scatter(
        1, here, torch.where(tops.abs().unsqueeze(-1) < torch.inf, drawn, -1)
    )


def draw_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw a seed [1] int64 from `generator`, or from torch's global generator."""
    drawn_on = device if generator is None else generator.device
    return torch.randint(2**63 - 1, (1,), generator=generator, device=drawn_on).to(device)
