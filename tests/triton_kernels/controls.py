"""Negative controls: wrong implementations that a test of the distribution must detect."""

import torch
from torch import Tensor

from hf_speculate.triton_kernels.reference.chain import Chain, End
from hf_speculate.triton_kernels.reference.rejection import Draft, FinalDistribution, Target, final_distribution


def residual_of_logits(
    target: Target, draft: Draft, chain: Chain, end: End, ratios: Tensor | None = None
) -> FinalDistribution:
    """`final_distribution` with the residual of logits instead of probabilities."""
    final = final_distribution(target, None, chain, end._replace(rejected=torch.zeros_like(end.rejected)))
    logsumexp = target.logsumexp.gather(1, end.num_accepted.unsqueeze(-1))
    logits = final.weights.log() + final.pieces.expand(logsumexp).unsqueeze(-1)
    residual = (logits - final.pieces.gather_at(draft.logits, end.last)).clamp(min=0.0)
    return final._replace(weights=torch.where(final.pieces.expand(end.rejected).unsqueeze(-1), residual, final.weights))
