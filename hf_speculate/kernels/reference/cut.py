"""Torch reference of `warp_logits`."""

import torch
from torch import Tensor

from .._inputs import BINS_PER_NAT, NUM_BINS, Cut
from .rows import scale


def cut(logits: Tensor, temperature: float, rule: Cut) -> Tensor:
    """See `warp_logits`."""
    scaled = scale(
        logits, temperature, torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    )
    top = scaled.amax(-1, keepdim=True)  # [B, 1], NaN if any entry is NaN
    distance = top - scaled
    bins = (distance * BINS_PER_NAT).nan_to_num_(0.0).clamp_(0.0, NUM_BINS - 1.0).to(torch.int64)
    counts = torch.zeros(len(scaled), NUM_BINS, dtype=torch.int64, device=scaled.device)
    counts.scatter_add_(1, bins, torch.ones_like(bins))[:, -1] = 0  # the last bin is always dropped
    is_kept = counts.cumsum(-1) - counts < rule.top_k
    indices = torch.arange(NUM_BINS, dtype=torch.float32, device=scaled.device)
    masses = torch.where(is_kept, counts * (-(indices + 0.5) / BINS_PER_NAT).exp(), 0.0)
    is_kept &= masses.cumsum(-1) - masses < rule.top_p * masses.sum(-1, keepdim=True)
    last = is_kept.sum(-1, keepdim=True) - 1  # [B, 1]
    is_dropped = (bins > last) | (distance > rule.most_below)
    return scaled.masked_fill_(is_dropped & (top.abs() < torch.inf), -torch.inf)
