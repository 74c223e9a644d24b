"""Mistakes that a law test must notice."""

import torch
from torch import Tensor

from hf_speculate.triton_kernels.reference.rejection import Draft, LastLaw, Target, last_law
from hf_speculate.triton_kernels.reference.walk import Chain, End


def residual_of_logits(target: Target, draft: Draft, chain: Chain, end: End, ratios: Tensor | None = None) -> LastLaw:
    """`last_law` with the residual taken between logits, as if they were probabilities."""
    law = last_law(target, None, chain, end._replace(refused=torch.zeros_like(end.refused)))
    logsumexp = target.logsumexp.gather(1, end.num_accepted.unsqueeze(-1))
    logits = law.weights.log() + law.pieces.spread(logsumexp).unsqueeze(-1)
    residual = (logits - law.pieces.of_row(draft.logits, end.last)).clamp(min=0.0)
    return law._replace(weights=torch.where(law.pieces.spread(end.refused).unsqueeze(-1), residual, law.weights))
