"""Launch attention for a few queries; `reference.attention` defines the results."""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._inputs import Attention
from .attention import attend_kernel, key_spans_kernel, merge_kernel

MIN_PRODUCT = 16  # smallest size of each dimension of a matrix product
ROWS = (MIN_PRODUCT, 32, 64)  # tiles of query rows
# Programs per multiprocessor, and the number of multiprocessors if it is unknown. Both are
# estimates, not yet measured: two tiles of keys and values fit into shared memory.
PROGRAMS_PER_PROCESSOR, NUM_PROCESSORS = 2, 128
MAX_PARTS = 64  # shares of the keys; more shares would cost more in the merge than they save


class Tile(NamedTuple):
    """Sizes of one program of `attend_kernel`.

    No tile spills on cuda 80, 90 or 120, with at least 99 KiB of shared memory per block.
    """

    num_rows: int
    num_columns: int
    num_warps: int


def tile_of(num_rows: int, width: int, dtype: torch.dtype) -> Tile:
    """Return the tile for `num_rows` query rows of a KV head."""
    if dtype == torch.float32:
        return Tile(ROWS[0], *((32, 8) if width > 128 else (16, 4)))
    rows = next((rows for rows in ROWS if rows >= num_rows), ROWS[-1])
    if width > 128:
        return Tile(min(rows, 32), 32, 4 if rows == ROWS[0] else 8)
    return Tile(rows, 64, 8 if rows == ROWS[-1] else 4)


def num_parts_of(num_tiles: int, num_keys: int, num_columns: int, device: torch.device) -> int:
    """Return the number of shares into which the keys are split for each tile of rows.

    It is large enough to fill the device, and leaves each share at least one block of keys.
    """
    wanted = -(-PROGRAMS_PER_PROCESSOR * _num_processors(device) // max(num_tiles, 1))
    return max(min(wanted, -(-num_keys // num_columns), MAX_PARTS), 1)


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return NUM_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def key_spans(mask: Tensor) -> Tensor:
    """See `attention.key_spans`."""
    batch_size, _, num_query, num_keys = mask.shape
    spans = torch.empty(batch_size, num_query, 2, dtype=torch.int32, device=mask.device)
    strides = {"mask_stride_b": mask.stride(0), "mask_stride_q": mask.stride(2)}
    sizes = {"num_query": num_query, "num_keys": num_keys, "lowest": torch.finfo(mask.dtype).min}
    arguments: dict[str, Any] = {"mask_ptr": mask, "spans_ptr": spans, **strides, **sizes}
    launched(mask.device, key_spans_kernel, (batch_size, num_query), arguments, num_warps=4)
    return spans


def attend(inputs: Attention, num_parts: int | None = None) -> Tensor:
    """Compute attention, see `attention.attend`, with `num_parts` shares of the keys."""
    query, key, value, spans, scaling, softcap, sinks = inputs
    batch_size, num_query_heads, num_query, width = query.shape
    num_heads, num_keys, device = key.shape[1], key.shape[2], query.device
    num_groups = num_query_heads // num_heads
    tile = tile_of(num_groups * num_query, width, query.dtype)
    num_row_tiles = -(-num_groups * num_query // tile.num_rows)
    if num_parts is None:
        num_parts = num_parts_of(
            batch_size * num_heads * num_row_tiles, num_keys, tile.num_columns, device
        )
    num_rows = batch_size * num_query_heads * num_query
    parts = torch.empty(num_parts, num_rows, width, dtype=torch.float32, device=device)
    stats = torch.empty(2, num_parts, num_rows, dtype=torch.float32, device=device)
    out = torch.empty(
        batch_size, num_query, num_query_heads, width, dtype=query.dtype, device=device
    )
    if not num_rows:
        return out
    arguments: dict[str, Any] = {
        "query_ptr": query, "key_ptr": key, "value_ptr": value, "spans_ptr": spans,
        "sinks_ptr": sinks, "parts_ptr": parts, "stats_ptr": stats, "out_ptr": out,
        **_strides("query", query, "bhq"), **_strides("key", key, "bht"), **_strides("value", value,
        "bht"), "spans_stride_b": 0 if spans.shape[0] == 1 else spans.stride(0),
        "scaling": 1.0 / math.sqrt(width) if scaling is None else float(scaling),
        "softcap": None if softcap is None else float(softcap),
        "num_heads": num_heads, "num_groups": num_groups, "num_query": num_query,
        "num_rows": num_rows, "num_parts": num_parts,
        "WIDTH": width, "PADDED_WIDTH": max(1 << (width - 1).bit_length(), MIN_PRODUCT),
        "ROWS": tile.num_rows, "COLUMNS": tile.num_columns,
    }  # fmt: skip
    grid = (batch_size * num_heads, num_row_tiles, num_parts)
    launched(device, attend_kernel, grid, arguments, num_warps=tile.num_warps, num_stages=2)
    launched(device, merge_kernel, (num_rows,), arguments, num_warps=1)
    return out


def _strides(name: str, tensor: Tensor, dims: str) -> dict[str, int]:
    return {
        f"{name}_stride_{dim}": stride for dim, stride in zip(dims, tensor.stride(), strict=False)
    }


def launched(
    device: torch.device,
    kernel: Any,
    grid: tuple[int, ...],
    by_name: dict[str, Any],
    **options: int,
) -> None:
    """Launch a kernel with the arguments that it names."""
    arguments = [by_name[name] for name in _arg_names(kernel)]
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **options)
        return
    with torch.cuda.device(device):  # Triton launches on the current device
        kernel[grid](*arguments, **options)


@cache
def _arg_names(kernel: Any) -> tuple[str, ...]:
    """Return the names of a kernel's arguments; Triton rebuilds the list on every access."""
    return tuple(kernel.arg_names)
