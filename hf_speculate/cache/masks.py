"""Attention masks: bool and additive masks of the columns hidden from each query."""

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_SPAN_MASKS = WeakIdKeyDictionary()
"""Additive masks from our caches, with entries 0 and -inf and adjacent zeros in every row."""


def marked_as_spans(mask: Tensor) -> Tensor:
    """Mark an additive mask as one with a contiguous span of columns per query, and return it."""
    if mask.device.type == "cuda" and not torch.compiler.is_compiling():
        _SPAN_MASKS[mask] = True
    return mask


def shows_spans(mask: Tensor) -> bool:
    """Return whether this very tensor was marked; a mask derived from it in a model is not."""
    return mask in _SPAN_MASKS


def hidden(key_positions: Tensor, query_positions: Tensor, window: int | None) -> Tensor:
    """Mark the keys hidden from each query, [B or 1, Q, T] bool.

    Args:
        key_positions: [T] or [B or 1, 1, T] int64.
        query_positions: [B or 1, Q, 1] int64.
        window: Number of tokens visible to a query, including the query; None for all tokens.
    """
    is_later = key_positions > query_positions
    return is_later if window is None else is_later | (key_positions <= query_positions - window)


def additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert [B, N, T] bool to an additive mask [B, 1, N, T]: -inf where True, 0 elsewhere."""
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, -torch.inf)[:, None]
