"""Attention masks: which columns a query does not see, and additive masks of that."""

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_SPAN_MASKS = WeakIdKeyDictionary()
"""Additive masks with the entries 0 and -inf whose zeros follow each other in every row: those of our caches."""


def marked_as_spans(mask: Tensor) -> Tensor:
    """Mark an additive mask: each query sees a span of columns, from a first to a last. Returns the mask."""
    if mask.device.type == "cuda" and not torch.compiler.is_compiling():
        _SPAN_MASKS[mask] = True
    return mask


def shows_spans(mask: Tensor) -> bool:
    """Return whether this very tensor was marked; a mask that a model has made of it was not."""
    return mask in _SPAN_MASKS


def hidden(key_positions: Tensor, query_positions: Tensor, window: int | None) -> Tensor:
    """[B or 1, Q, T] bool: which keys at [T] or [B or 1, 1, T] queries at [B or 1, Q, 1] do not see."""
    is_later = key_positions > query_positions
    return is_later if window is None else is_later | (key_positions <= query_positions - window)


def additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, N, T]: -inf where [B, N, T] bool is set, 0 elsewhere."""
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, -torch.inf)[:, None]
