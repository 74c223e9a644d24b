"""Torch reference of attention for a few queries: an explicit softmax over all columns."""

import math

import torch
from torch import Tensor

from .._inputs import Attention


def key_spans(mask: Tensor) -> Tensor:
    """See `attention.key_spans`."""
    mask = mask[:, 0]  # [B or 1, Q, T]
    columns = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device)
    is_hidden = mask <= torch.finfo(mask.dtype).min
    end = torch.where(is_hidden, 0, columns + 1).amax(-1)
    first = torch.where(is_hidden, mask.shape[-1], columns).amin(-1).minimum(end)
    return torch.stack([first, end], dim=-1).to(torch.int32)


def attend(inputs: Attention) -> Tensor:
    """See `attention.attend`; computes in float64 for float64, in float32 for other dtypes."""
    query, key, value, spans, scaling, softcap, sinks = inputs
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups, width = query.shape[1] // key.shape[1], query.shape[3]
    first, end = spans.unbind(-1)  # [B or 1, Q]
    columns = torch.arange(key.shape[2], device=key.device)
    # [B or 1, 1, Q, T]
    is_seen = ((columns >= first[..., None]) & (columns < end[..., None]))[:, None]
    is_read = is_seen.any(dim=2)[..., None]  # [B or 1, 1, T, 1]
    # [B, g*H, T, D]
    keys, values = (
        states.to(dtype).masked_fill(~is_read, 0.0).repeat_interleave(groups, dim=1)
        for states in (key, value)
    )
    # [B, g*H, Q, T]
    scores = query.to(dtype) @ keys.mT * (1.0 / math.sqrt(width) if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    top = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(
        -1, keepdim=True
    )
    if sinks is not None:
        top = top.maximum(sinks.to(dtype)[:, None, None])
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)  # [B, g*H, Q, 1]
    if sinks is not None:
        total = total + (sinks.to(dtype)[:, None, None] - top).exp()
    output = torch.where(total == 0.0, 0.0, weights @ values / total)
    return output.transpose(1, 2).to(query.dtype).contiguous()
