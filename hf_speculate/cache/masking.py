"""Additive attention masks, from what each query sees."""

import torch
from torch import Tensor


def additive_mask(places: Tensor, seen: Tensor, pads: Tensor | None, window: int | None, dtype: torch.dtype) -> Tensor:
    """[B or 1, 1, Q, T]: 0 where the query at a column of `places` [B or 1, Q] sees one of `seen` [T], -inf elsewhere.

    A row's first `pads` [B] columns are padding; a query sees `window` tokens, itself among them, or all.
    """
    at = places[:, :, None]
    is_hidden = seen > at
    if window is not None:
        is_hidden = is_hidden | (seen <= at - window)
    if pads is not None:
        is_hidden = is_hidden | (seen < pads[:, None, None])
    return additive(is_hidden, dtype)


def additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, N, T]: -inf where [B, N, T] bool is set, 0 elsewhere."""
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, -torch.inf)[:, None]
