"""SDPA attention that folds the heads of a group into query rows where transformers copies keys and values.

With grouped queries g query heads share one key-value head. transformers' `sdpa` copies keys and values g times as soon
as several query rows meet a mask, which is every verification. Folded, the g heads are g times as many rows of one
head, and keys and values are read where they lie:

    query [B, g*H, Q, D] -> [B, H, g*Q, D],    mask [B, 1, Q, T] -> [B, 1, g*Q, T]

Every row's softmax is over the same numbers as before, so the result differs by round-off at most.
"""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FOLDED = "hf_speculate_folded"  # our name in transformers' registries
STANDS_FOR = "sdpa"  # what it replaces, and passes on to

# On other devices transformers asks SDPA for grouped heads itself, or changes the mask.
_DEVICES = ("cpu", "cuda")
# Arguments that change what transformers' function computes; all others it ignores, and so do we.
_HONOURED = ("position_bias", "cache", "softcap")
# The folded mask is a copy of g*Q*T entries a row. Up to 64 query tokens folding was as fast or faster, from 256 on
# slower (float32 and bfloat16, 500 to 1000 states, g = 4, 2-core CPU).
_MOST_QUERY_TOKENS = 64

_is_folding: contextvars.ContextVar[bool] = contextvars.ContextVar("hf_speculate_is_folding", default=False)


@contextmanager
def folding() -> Iterator[None]:
    """Let `folded_attention` fold in this thread or task; elsewhere it passes on."""
    token = _is_folding.set(True)
    try:
        yield
    finally:
        _is_folding.reset(token)


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' `sdpa` computes it, without copies of keys and values where it would make them.

    It folds inside `folding()` and in code that `torch.compile` traces, which knows no context; whatever it cannot
    fold it passes on to what is registered as "sdpa".

    Args:
        module: the attention layer; its `num_key_value_groups` is g.
        query: [B, g*H, Q, D] floating.
        key: [B, H, T, D] floating.
        value: [B, H, T, D'] floating.
        attention_mask: [B or 1, 1, Q, T], bool (True: seen) or floating (added); None: the rows are causal.
        dropout: in [0, 1), of the attention weights.
        scaling: of the scores; None: 1 / sqrt(D).
        is_causal: whether a missing mask means causal rows; None: as `module.is_causal` says.
        **kwargs: for the function that this stands for.

    Returns:
        [B, Q, g*H, D'] contiguous, and None in place of the weights.
    """
    passed_on: Any = ALL_ATTENTION_FUNCTIONS[STANDS_FOR]
    is_ours = torch.compiler.is_compiling() or _is_folding.get()
    if not (
        is_ours and passed_on is sdpa_attention_forward and _can_fold(module, query, attention_mask, dropout, kwargs)
    ):
        result: tuple[Tensor, None] = passed_on(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return result
    groups: Any = module.num_key_value_groups
    num_query = query.shape[2]
    folded = query.reshape(query.shape[0], -1, groups * num_query, query.shape[3])  # [B, H, g*Q, D]
    if attention_mask is not None and num_query > 1:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)  # [B, 1, g*Q, T]
    output = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    output = output.reshape(output.shape[0], -1, num_query, value.shape[3])  # [B, g*H, Q, D']
    return output.transpose(1, 2).contiguous(), None


def register_folded_attention() -> None:
    """Make `FOLDED` known to transformers, with the masks of what it stands for; again is harmless."""
    if FOLDED not in ALL_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(FOLDED, _make_mask)
        AttentionInterface.register(FOLDED, folded_attention)


def _can_fold(
    module: nn.Module, query: Tensor, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> bool:
    if getattr(module, "num_key_value_groups", 1) <= 1 or dropout or query.device.type not in _DEVICES:
        return False
    if any(kwargs.get(name) is not None for name in _HONOURED):
        return False
    if attention_mask is None:
        return query.shape[2] == 1  # sees everything; several rows are a prefill, causal without a mask
    is_shared = attention_mask.ndim == 4 and attention_mask.shape[1] == 1
    return is_shared and attention_mask.shape[2] == query.shape[2] <= _MOST_QUERY_TOKENS


def _make_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask of what `FOLDED` stands for, as registered at the time of the call."""
    make: Any = ALL_MASK_ATTENTION_FUNCTIONS[STANDS_FOR]
    return make(*args, **kwargs)
