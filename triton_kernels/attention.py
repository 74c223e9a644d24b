"""Attention of a few query tokens per row over many keys."""

import math

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_shape
from ._inputs import Attention
from .backends import operations
from .errors import ConfigError, ShapeError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def split_key_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    num_splits: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Scaled dot-product attention whose keys are split over the multiprocessors of a GPU.

    Made for verification: few query tokens over a long KV cache, where one program per row and head would leave most
    of a GPU idle. Query heads that share a key-value head are computed together, and keys and values are read where
    they lie. The kernels need no value of any tensor on the host. They have no backward pass.

    Args:
        query: [B, g*H, Q, D], float16, bfloat16 or float32, any strides. Meant for Q <= 16.
        key: [B, H, T, D], T >= 1, same dtype.
        value: [B, H, T, D'], same dtype.
        mask: [B or 1, g*H or 1, Q or 1, T], bool (True: seen) or floating (added to the scores); None: every query
            sees all keys.
        scaling: of the scores; None: 1 / sqrt(D).
        num_splits: parts that the keys are split into, >= 1; None: chosen from B, H, T and the number of
            multiprocessors. It changes the result by round-off.
        backend: "auto", "torch" or "triton".

    Returns:
        [B, g*H, Q, D'], in memory ordered as [B, Q, g*H, D']; 0 for a query that sees no key.

    Raises:
        ConfigError: unknown backend, or num_splits < 1.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: a tensor has a wrong shape, dtype or device.
    """
    if query.dim() != 4 or value.dim() != 4 or 0 in query.shape or 0 in value.shape:
        raise ShapeError(
            f"query and value must be [B, g*H, Q, D] and [B, H, T, D'] without empty dimensions, got "
            f"{list(query.shape)} and {list(value.shape)}"
        )
    batch_size, num_heads, num_query, width = query.shape
    _, num_kv_heads, num_keys, _ = value.shape
    check_dtype("query", query, _DTYPES)
    check_shape("key", key, "B, H, T, D", (batch_size, num_kv_heads, num_keys, width))
    check_shape("value", value, "B, H, T, D'", (batch_size, *value.shape[1:]))
    if num_heads % num_kv_heads:
        raise ShapeError(f"query must have a multiple of {num_kv_heads} heads, like key, got {num_heads}")
    for name, tensor in (("key", key), ("value", value)):
        check_dtype(name, tensor, (query.dtype,))
        check_device(name, tensor, query, "query")
    if mask is not None:
        check_dtype("mask", mask, (torch.bool, *_DTYPES))
        check_device("mask", mask, query, "query")
        shape = (batch_size, num_heads, num_query, num_keys)
        if mask.dim() != 4 or mask.shape[3] != num_keys or any(n not in (1, m) for n, m in zip(mask.shape, shape)):  # noqa: B905
            raise ShapeError(f"mask must broadcast to [B, g*H, Q, T] = {list(shape)}, got {list(mask.shape)}")
        mask = mask.expand(shape)
    if num_splits is not None and num_splits < 1:
        raise ConfigError(f"num_splits must be >= 1, got {num_splits}; leave it out to have it chosen")
    inputs = Attention(query, key, value, mask, 1 / math.sqrt(width) if scaling is None else float(scaling))
    return operations(backend, query.device).attend(inputs, num_splits).transpose(1, 2)
