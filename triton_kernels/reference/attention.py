"""Torch reference of attention, in float64."""

import torch
from torch import Tensor

from .._inputs import Attention


def attend(inputs: Attention, num_splits: int | None) -> Tensor:
    """See `split_key_attention`; [B, Q, g*H, D']. Nothing is split."""
    query, key, value, mask, scaling = inputs
    groups = query.shape[1] // key.shape[1]
    folded = query.double().unflatten(1, (key.shape[1], groups))  # [B, H, g, Q, D]
    scores = (folded @ key.double().mT[:, :, None]).flatten(1, 2) * scaling  # [B, g*H, Q, T]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    top = scores.amax(-1, keepdim=True)
    weights = (scores - torch.where(top == -torch.inf, 0.0, top)).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)  # 0 for a query that sees no key
    output = weights.unflatten(1, (key.shape[1], groups)) @ value.double()[:, :, None]
    output = output.flatten(1, 2).transpose(1, 2)  # [B, Q, g*H, D']
    return torch.empty(output.shape, dtype=query.dtype, device=query.device).copy_(output)
