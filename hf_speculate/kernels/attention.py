"""Attention of a few queries over many keys ("flash decoding"), for verification and drafting.

Verification scores K+1 tokens of each row against all earlier keys. In kernels for prompts, one
multiprocessor reads all keys of a head. Here, the keys are split over all multiprocessors. A query
sees a span of columns. Causal masks, padding, rows of different lengths, and windows can all be
written as spans.

    output[q] = sum_t exp(s[q, t] - m) value[t] / (sum_t exp(s[q, t] - m) + exp(sink - m))
    with first[q] <= t < end[q]
    s[q, t] = cap(scaling * query[q] . key[t]),  cap(s) = softcap * tanh(s / softcap)
"""

import torch
from torch import Tensor

from . import reference
from ._checks import FLOAT_DTYPES, check_device, check_dtype, check_shape
from ._inputs import Attention
from .backends import runs_kernels
from .errors import ConfigError, ShapeError

MAX_QUERY = 32  # tokens per row; with more, kernels for prompts also fill the device
MAX_WIDTH = 256
_UNIT_BYTES = 16  # size of one vector load
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def key_spans(mask: Tensor, *, backend: str = "auto") -> Tensor:
    """Return the span of visible columns in each row of an additive mask, without a host sync.

    Args:
        mask: [B or 1, 1, Q, T] floating. The visible columns of a row are adjacent. A column is
            hidden if its entry is the lowest finite number or below.
        backend: "auto", "torch" or "triton".

    Returns:
        [B or 1, Q, 2] int32: the first visible column, and one past the last; 0 and 0 if all are
        hidden.

    Raises:
        ConfigError: the backend is unknown.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: the shape or dtype of the mask is not supported.
    """
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] == 0:
        raise ShapeError(f"mask must be [B or 1, 1, Q, T] with T >= 1, got {list(mask.shape)}")
    check_dtype("mask", mask, FLOAT_DTYPES)
    if runs_kernels(backend, mask.device):
        from . import kernels  # imports Triton

        return kernels.key_spans(mask if mask.stride(3) == 1 else mask.contiguous())
    return reference.key_spans(mask)


@torch.no_grad()
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute attention of a few query tokens, each over a span of columns, in float32.

    The output of a query without columns is zero. Columns outside every span are not read and may
    be NaN.

    Args:
        query: [B, g*H, Q, D], float16, bfloat16 or float32; float64 only with torch.
        key: [B, H, T, D], in the dtype of the query. Views of longer buffers are read in place.
        value: [B, H, T, D], in the dtype of the query.
        spans: [B or 1, Q, 2] int32 in 0..T, the first column seen by each query, and one past the
            last.
        scaling: factor on the scores; None for 1 / sqrt(D).
        softcap: limit on the scores, > 0; None for no limit.
        sinks: [g*H] floating, a score per head that has no value; None for no sinks.
        backend: "auto", "torch" or "triton".

    Returns:
        [B, Q, g*H, D], contiguous, in the dtype of the query.

    Raises:
        ConfigError: the backend is unknown, or the soft cap is out of range.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: a shape, dtype, width or stride is not supported.
    """
    inputs = Attention(query, key, value, spans, scaling, softcap, sinks)
    _check(inputs)
    obstacle = (
        obstacle_of(query, key, value) if runs_kernels(backend, query.device) else "no kernels"
    )
    if not obstacle:
        from . import kernels  # imports Triton

        return kernels.attend(inputs)
    if backend == "triton":
        raise ShapeError(f'{obstacle}; leave it to backend="torch"')
    return reference.attend(inputs)


def obstacle_of(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Return why the kernel cannot read these states; empty if it can."""
    width = query.shape[-1]
    if query.dtype not in _KERNEL_DTYPES:
        dtype = str(query.dtype).removeprefix("torch.")
        return f"query must be bfloat16, float16 or float32, got {dtype}"
    if width > MAX_WIDTH or width % (_UNIT_BYTES // 2):
        return f"D must be a multiple of 8 up to {MAX_WIDTH}, got {width}"
    if query.stride(3) != 1:
        return (
            f"the entries of a head must be contiguous in query, got a stride of {query.stride(3)}"
        )
    for name, states in (("key", key), ("value", value)):
        strides = states.stride()
        if (
            strides[3] != 1
            or any(stride % 8 for stride in strides[:3])
            or states.data_ptr() % _UNIT_BYTES
        ):
            return (
                f"{name} must have contiguous heads that begin at multiples of 16 bytes, got "
                f"strides {strides}"
            )
    return ""


def _check(inputs: Attention) -> None:
    query, key, value, spans, _, softcap, sinks = inputs
    if query.dim() != 4 or key.dim() != 4 or not key.shape[1] or query.shape[1] % key.shape[1]:
        shapes = f"{list(query.shape)} and {list(key.shape)}"
        raise ShapeError(f"query and key must be [B, g*H, Q, D] and [B, H, T, D], got {shapes}")
    batch_size, num_query_heads, num_query, width = query.shape
    num_keys = key.shape[2]
    check_dtype("query", query, FLOAT_DTYPES)
    check_shape("key", key, "B, H, T, D", (batch_size, key.shape[1], num_keys, width))
    check_shape("value", value, "B, H, T, D", key.shape)
    for name, states in (("key", key), ("value", value)):
        check_dtype(name, states, (query.dtype,))
        check_device(name, states, query, "the query")
    num_rows = spans.shape[0] if spans.dim() == 3 and spans.shape[0] == 1 else batch_size
    check_shape("spans", spans, "B or 1, Q, 2", (num_rows, num_query, 2))
    check_dtype("spans", spans, (torch.int32,))
    check_device("spans", spans, query, "the query")
    if sinks is not None:
        check_shape("sinks", sinks, "g*H", (num_query_heads,))
        check_device("sinks", sinks, query, "the query")
    if softcap is not None and not softcap > 0.0:
        raise ConfigError(f"softcap must be > 0, got {softcap}; leave it out for no limit")
