"""Attention of few query tokens over keys that are split over programs.

The first launch gives each program one part of the keys for all query rows that share a key-value head, and a running
maximum and sum: the program stores its output, normalised, and its log-sum-exp. The second launch merges the parts,
weighted by exp(log-sum-exp). With a single part the first launch writes the result.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._inputs import Attention
from ..backends import is_interpreting

# Programs that the first launch spreads over each multiprocessor, and keys that each reads at least. Estimates, not
# measured yet: a part costs g*Q*D floats written and read again, so that more parts than fill the device cost time.
PROGRAMS_PER_MULTIPROCESSOR = 2
MIN_KEYS_PER_SPLIT = 128
MAX_SPLITS = 128
SPLITS_AT_ONCE = tl.constexpr(16)  # merged in one step
# Warps and tile sizes with which no width up to 256 spills a register on cuda 90.
NUM_WARPS = 8
_TILE_BYTES = 8192  # of keys, and of values, that are loaded at once
_MIN_KEYS, _MAX_KEYS = 32, 64
_MIN_ROWS, _MAX_ROWS = 32, 64  # query rows of a program
_MIN_KEYS_FLOAT32 = _ROWS_FLOAT32 = 16  # float32 is multiplied without tensor cores
_MULTIPROCESSORS = 132  # where no device can be asked

_RUN_TIME = [
    *(f"{name}_stride_{axis}" for name in ("query", "mask") for axis in "bhq"),
    *(f"{name}_stride_{axis}" for name in ("key", "value") for axis in "bht"),
    "scaling", "num_kv_heads", "groups", "num_query", "num_keys", "keys_per_split", "num_outputs", "num_splits",
]  # fmt: skip
_jit = partial(triton.jit, do_not_specialize=_RUN_TIME, do_not_specialize_on_alignment=["mask_ptr"])


@triton.jit
def _stride(stride, ALIGNED: tl.constexpr):
    """The stride itself, written so that the compiler knows that 8 divides it: loads take 16 bytes then."""
    if ALIGNED:
        stride = stride // 8 * 8
    return stride


@_jit
def split_attention_kernel(
    query_ptr, key_ptr, value_ptr, mask_ptr, out_ptr, lse_ptr,
    query_stride_b, query_stride_h, query_stride_q, key_stride_b, key_stride_h, key_stride_t,
    value_stride_b, value_stride_h, value_stride_t, mask_stride_b, mask_stride_h, mask_stride_q,
    scaling, num_kv_heads, groups, num_query, num_keys, keys_per_split, num_outputs,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ALIGNED: tl.constexpr, IS_BOOL: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the keys. Grid: (B * H, parts, blocks of query rows).

    Without `lse_ptr` there is one part, and the output is final.
    """
    sequence = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    kv_head = tl.program_id(0) % num_kv_heads
    split = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = rows < groups * num_query
    heads = kv_head * groups + rows // num_query
    tokens = rows % num_query
    columns, value_columns = tl.arange(0, BLOCK), tl.arange(0, VALUE_BLOCK)
    lanes = tl.arange(0, KEYS)
    at = sequence * query_stride_b + heads.to(tl.int64) * query_stride_h + tokens.to(tl.int64) * query_stride_q
    query = tl.load(
        query_ptr + at[:, None] + columns[None, :], mask=is_row[:, None] & (columns < WIDTH)[None, :], other=0.0
    )
    if WIDENS:
        query = query.to(tl.float32)
    key_start = sequence * _stride(key_stride_b, ALIGNED) + kv_head.to(tl.int64) * _stride(key_stride_h, ALIGNED)
    value_start = sequence * _stride(value_stride_b, ALIGNED)
    value_start += kv_head.to(tl.int64) * _stride(value_stride_h, ALIGNED)
    key_step, value_step = _stride(key_stride_t, ALIGNED), _stride(value_stride_t, ALIGNED)
    if mask_ptr is not None:
        mask_rows = sequence * mask_stride_b + heads.to(tl.int64) * mask_stride_h + tokens.to(tl.int64) * mask_stride_q
    begin = split * keys_per_split
    end = tl.minimum(begin + keys_per_split, num_keys)
    key_tile = key_ptr + key_start + begin.to(tl.int64) * key_step
    value_tile = value_ptr + value_start + begin.to(tl.int64) * value_step
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    for first in range(begin, end, KEYS):
        keys = first + lanes
        is_key = keys < end
        key = tl.load(
            key_tile + lanes[:, None] * key_step + columns[None, :],
            mask=is_key[:, None] & (columns < WIDTH)[None, :],
            other=0.0,
        )
        if WIDENS:
            key = key.to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
        if mask_ptr is not None:
            bias = tl.load(
                (mask_ptr + mask_rows)[:, None] + keys[None, :],
                mask=is_row[:, None] & is_key[None, :],
                other=0,
            )
            if IS_BOOL:
                scores = tl.where(bias != 0, scores, float("-inf"))
            else:
                scores += bias.to(tl.float32)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        top_now = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(top_now == float("-inf"), 0.0, top_now)
        weights = tl.exp(scores - base[:, None])
        shrinks = tl.exp(top - base)
        total = total * shrinks + tl.sum(weights, axis=1)
        value = tl.load(
            value_tile + lanes[:, None] * value_step + value_columns[None, :],
            mask=is_key[:, None] & (value_columns < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        weights = weights.to(value.dtype)
        if WIDENS:
            weights, value = weights.to(tl.float32), value.to(tl.float32)
        sums = sums * shrinks[:, None] + tl.dot(weights, value, input_precision="ieee")
        top = top_now
        key_tile += KEYS * key_step
        value_tile += KEYS * value_step
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    num_heads = num_kv_heads * groups
    outputs = (sequence * num_query + tokens) * num_heads + heads + split.to(tl.int64) * num_outputs
    if lse_ptr is not None:
        tl.store(lse_ptr + outputs, top + tl.log(total), mask=is_row)  # -inf of a part in which nothing is seen
    tl.store(
        out_ptr + outputs[:, None] * VALUE_WIDTH + value_columns[None, :],
        sums.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (value_columns < VALUE_WIDTH)[None, :],
    )


@_jit
def merge_attention_kernel(
    parts_ptr, lse_ptr, out_ptr, num_outputs, num_splits, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one output row. Grid: (B * Q * g * H,)."""
    output = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    splits = tl.arange(0, SPLITS)
    lses = tl.load(lse_ptr + splits * num_outputs + output, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(lses, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lses - base), axis=0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_splits, SPLITS_AT_ONCE):
        some = first + tl.arange(0, SPLITS_AT_ONCE)
        at = some.to(tl.int64) * num_outputs + output
        weights = tl.exp(tl.load(lse_ptr + at, mask=some < num_splits, other=float("-inf")) - base)
        parts = tl.load(
            parts_ptr + at[:, None] * WIDTH + columns[None, :],
            mask=(some < num_splits)[:, None] & (columns < WIDTH)[None, :],
            other=0.0,
        )
        sums += tl.sum(parts * weights[:, None], axis=0)
    sums = sums / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + output * WIDTH + columns, sums.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


class KernelCall(NamedTuple):
    """A kernel with its grid and arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


def attend(inputs: Attention, num_splits: int | None) -> Tensor:
    """See `split_key_attention`; [B, Q, g*H, D']."""
    query, _, value, _, _ = inputs
    batch_size, num_heads, num_query, _ = query.shape
    out = torch.empty(batch_size, num_query, num_heads, value.shape[-1], dtype=query.dtype, device=query.device)
    if query.device.type != "cuda" or query.device.index == torch.cuda.current_device():
        _run(inputs, out, num_splits)
    else:
        with torch.cuda.device(query.device):  # Triton launches on the current device
            _run(inputs, out, num_splits)
    return out


def _run(inputs: Attention, out: Tensor, num_splits: int | None) -> None:
    for kernel, grid, arguments in kernel_calls(inputs, out, num_splits):
        kernel[grid](**arguments, num_warps=NUM_WARPS)


def kernel_calls(inputs: Attention, out: Tensor, num_splits: int | None) -> Iterator[KernelCall]:
    """The one or two launches that write `out` [B, Q, g*H, D']."""
    query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in inputs[:3])
    mask = inputs.mask if inputs.mask is None or inputs.mask.stride(-1) == 1 else inputs.mask.contiguous()
    batch_size, num_heads, num_query, width = query.shape
    _, num_kv_heads, num_keys, value_width = value.shape
    num_rows = num_heads // num_kv_heads * num_query
    is_float32 = query.dtype == torch.float32
    rows_block = _ROWS_FLOAT32 if is_float32 else min(max(_power_of_two(num_rows), _MIN_ROWS), _MAX_ROWS)
    keys_block = _TILE_BYTES // (_power_of_two(max(width, value_width)) * query.element_size())
    keys_block = min(max(keys_block, _MIN_KEYS_FLOAT32 if is_float32 else _MIN_KEYS), _MAX_KEYS)
    num_row_blocks = -(-num_rows // rows_block)
    if num_splits is None:
        num_programs = batch_size * num_kv_heads * num_row_blocks
        num_splits = choose_num_splits(num_programs, num_keys, num_multiprocessors(query.device))
    keys_per_split = -(-num_keys // min(num_splits, MAX_SPLITS))
    keys_per_split = -(-keys_per_split // keys_block) * keys_block  # no block is read in two halves
    num_splits = -(-num_keys // keys_per_split)
    num_outputs = batch_size * num_query * num_heads
    parts, lse = out, None
    if num_splits > 1:
        parts = torch.empty(num_splits, num_outputs, value_width, dtype=torch.float32, device=out.device)
        lse = torch.empty(num_splits, num_outputs, dtype=torch.float32, device=out.device)
    strides = (*key.stride()[:3], *value.stride()[:3])
    yield KernelCall(
        split_attention_kernel,
        (batch_size * num_kv_heads, num_splits, num_row_blocks),
        {
            "query_ptr": query, "key_ptr": key, "value_ptr": value, "out_ptr": parts, "lse_ptr": lse,
            "mask_ptr": mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask,
            **_strides("query", "bhq", query), **_strides("key", "bht", key), **_strides("value", "bht", value),
            **_strides("mask", "bhq", mask), "scaling": inputs.scaling, "num_kv_heads": num_kv_heads,
            "groups": num_heads // num_kv_heads, "num_query": num_query, "num_keys": num_keys,
            "keys_per_split": keys_per_split, "num_outputs": num_outputs,
            "WIDTH": width, "VALUE_WIDTH": value_width,
            "BLOCK": _power_of_two(width), "VALUE_BLOCK": _power_of_two(value_width),
            "ROWS": rows_block, "KEYS": keys_block, "ALIGNED": all(stride % 8 == 0 for stride in strides),
            "IS_BOOL": mask is not None and mask.dtype == torch.bool,
            # Triton's interpreter multiplies the bits of bfloat16.
            "WIDENS": query.dtype == torch.bfloat16 and is_interpreting(),
        },
    )  # fmt: skip
    if lse is not None:
        yield KernelCall(
            merge_attention_kernel,
            (num_outputs,),
            {
                "parts_ptr": parts, "lse_ptr": lse, "out_ptr": out, "num_outputs": num_outputs,
                "num_splits": num_splits, "WIDTH": value_width, "BLOCK": _power_of_two(value_width),
                "SPLITS": MAX_SPLITS,
            },
        )  # fmt: skip


def choose_num_splits(num_programs: int, num_keys: int, multiprocessors: int) -> int:
    """Number of parts of the keys, from `num_programs` of one part: as many as fill the device, each long enough."""
    most = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // num_programs
    return max(1, min(most, num_keys // MIN_KEYS_PER_SPLIT, MAX_SPLITS))


@lru_cache(maxsize=16)
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU, which torch knows without asking the device."""
    if device.type != "cuda":
        return _MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _power_of_two(number: int) -> int:
    """The next power of two, at least 16, as products of tiles need."""
    return max(16, 1 << (number - 1).bit_length())


def _strides(name: str, axes: str, tensor: Tensor | None) -> dict[str, int]:
    strides = (0,) * len(axes) if tensor is None else tensor.stride()
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes, strides, strict=False)}
