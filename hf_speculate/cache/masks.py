"""Attention masks: which columns a query does not see, and additive masks of that."""

import torch
from torch import Tensor


def hidden(key_positions: Tensor, query_positions: Tensor, window: int | None) -> Tensor:
    """[B or 1, Q, T] bool: which keys at [T] or [B or 1, 1, T] queries at [B or 1, Q, 1] do not see."""
    is_later = key_positions > query_positions
    return is_later if window is None else is_later | (key_positions <= query_positions - window)


def additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, N, T]: -inf where [B, N, T] bool is set, 0 elsewhere."""
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, -torch.inf)[:, None]
