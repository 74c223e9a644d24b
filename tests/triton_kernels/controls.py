"""Mistakes that a law test must notice."""

import torch
from torch import Tensor

from hf_speculate.triton_kernels.reference.rejection import Draft
from hf_speculate.triton_kernels.reference.rows import Masses, pick_rows
from hf_speculate.triton_kernels.reference.walk import Chain, End


def residual_of_logits(
    target: Masses, draft: Draft, chain: Chain, end: End, ratios: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`last_law` with the residual taken between logits, as if they were probabilities."""
    masses = pick_rows(target.masses, end.num_accepted)
    here = end.num_accepted.unsqueeze(-1)
    logits = masses.log() + target.logsumexp.gather(1, here) - target.sums.gather(1, here).log()
    residual = (logits - pick_rows(draft.logits, end.last)).clamp(min=0.0)
    return torch.where(end.refused.unsqueeze(-1), residual, masses), torch.zeros_like(end.last, dtype=torch.int32)
