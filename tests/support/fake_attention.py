"""Model attention on the fake GPU: torch's choice of a backend, its requirements and its output."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
_HALF = (torch.float16, torch.bfloat16)
# Operators around the kernel. A bool mask is made additive, and a mask with odd strides is padded.
# The math backend is a chain of matrix products, masks and a softmax.
_MASK_LAUNCHES, _PAD_LAUNCHES, _MATH_LAUNCHES = 2, 1, 6


class AttentionCall(NamedTuple):
    """One call of an attention backend."""

    backend: str  # "cudnn", "flash", "efficient" or "math"
    plan: tuple[Any, ...]  # sizes and strides of all tensors; cuDNN has one plan per layout
    num_launches: int
    has_mask: bool


def sdpa_call(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Choose as torch does on sm_90 with cuDNN after 9.15: cuDNN, flash, memory-efficient, math."""
    backend = _choice(query, key, value, attn_mask, is_causal, enable_gqa)
    num = 1 if backend != "math" else _MATH_LAUNCHES
    if attn_mask is not None:
        num += _MASK_LAUNCHES * (attn_mask.dtype == torch.bool)
        num += _PAD_LAUNCHES * (backend == "efficient" and not _is_aligned(attn_mask))
    options = {"scale": scale, "enable_gqa": enable_gqa}
    output = scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, **options
    )
    return AttentionCall(
        backend, _plan(query, key, value, attn_mask), num, attn_mask is not None
    ), output


def direct_attention(name: str, *args: Any, **kwargs: Any) -> tuple[AttentionCall, tuple[Any, ...]]:
    """Call a backend by name; it runs or fails."""
    return (_flash if name == FLASH else _efficient)(*args, **kwargs)


def _flash(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    width = query.shape[-1]
    _require(query.dtype in _HALF, f"flash attention takes half precision, got {query.dtype}")
    _require(
        width == value.shape[-1] <= 256 and width % 8 == 0,
        f"flash attention takes no head of width {width}",
    )
    _require(query.shape[1] % key.shape[1] == 0, "query heads must share key-value heads evenly")
    _require(
        all(tensor.stride(-1) == 1 for tensor in (query, key, value)),
        "the last dimension must be contiguous",
    )
    mask = None
    if is_causal:  # the last query sees the last key, however many queries and keys there are
        num_query, num_keys = query.shape[2], key.shape[2]
        mask = torch.ones(num_query, num_keys, dtype=torch.bool).tril(num_keys - num_query)
    output = scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    output = output.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel writes [B, Q, H, D]
    call = AttentionCall("flash", _plan(query, key, value), 1, has_mask=False)
    return call, (output, None, None, None, query.shape[2], key.shape[2], None, None, None)


def _efficient(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    unit = 8 if query.dtype in _HALF else 4
    _require(
        query.shape[1] == key.shape[1] == value.shape[1],
        "memory-efficient attention takes no shared heads",
    )
    _require(
        query.shape[-1] % unit == 0 == value.shape[-1] % unit,
        "heads must be a multiple of 16 bytes wide",
    )
    for tensor in (query, key, value):
        _require(tensor.stride(-1) == 1, "the last dimension must be contiguous")
        _require(
            all(stride % unit == 0 for stride in tensor.stride()[:-1]),
            f"strides {tensor.stride()} are not aligned",
        )
    if attn_bias is not None:
        shape = (*query.shape[:3], key.shape[2])
        _require(
            tuple(attn_bias.shape) == shape,
            f"the mask must be {shape}, got {tuple(attn_bias.shape)}",
        )
        _require(
            attn_bias.dtype == query.dtype, f"the mask must be {query.dtype}, got {attn_bias.dtype}"
        )
        _require(
            _is_aligned(attn_bias, unit), f"a mask of strides {attn_bias.stride()} is not aligned"
        )
        _require(
            attn_bias.storage_offset() % unit == 0, "the mask must begin at a multiple of 16 bytes"
        )
    output = scaled_dot_product_attention(
        query, key, value, attn_bias, is_causal=is_causal, scale=scale
    )
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    call = AttentionCall("efficient", _plan(query, key, value, attn_bias), 1, attn_bias is not None)
    return call, (output, None, None, None)


def _choice(query, key, value, mask, is_causal, enable_gqa) -> str:
    width, is_half = query.shape[-1], query.dtype in _HALF
    is_wide = width == value.shape[-1] and width % 8 == 0
    if is_half and is_wide and width <= 128 and torch.backends.cuda.cudnn_sdp_enabled():
        return "cudnn"
    is_square = not is_causal or query.shape[2] == key.shape[2]
    if mask is None and is_half and width == value.shape[-1] <= 256 and is_square:
        return "flash" if torch.backends.cuda.flash_sdp_enabled() else "math"
    is_efficient = (
        width % (8 if is_half else 4) == 0 and not enable_gqa and query.shape[1] == key.shape[1]
    )
    return (
        "efficient" if is_efficient and torch.backends.cuda.mem_efficient_sdp_enabled() else "math"
    )


def _plan(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(
        (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        for tensor in tensors
        if tensor is not None
    )


def _is_aligned(mask: Tensor, unit: int = 8) -> bool:
    return mask.stride(-1) == 1 and all(stride % unit == 0 for stride in mask.stride()[:-1])


def _require(holds: bool, words: str) -> None:
    if not holds:
        raise RuntimeError(words)
