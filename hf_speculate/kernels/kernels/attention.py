"""Kernels for attention of a few queries: programs split the keys, a second launch merges.

One program reads a share of the keys of one KV head for a tile of query rows. The rows are the
query tokens of all query heads in the group, so keys and values are read once. For each row, the
program keeps the largest score `top`, the sum of `exp(score - top)`, and the sum of the values with
these weights. The second launch merges them over the shares.
"""

from functools import partial

import triton
import triton.language as tl

# Scores are in units of log 2, so the exponential is one instruction.
LOG2_E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(2**30)  # a column number after all columns
SPAN_COLUMNS = tl.constexpr(1024)  # columns of a mask read at once
PARTS_AT_ONCE = tl.constexpr(8)  # number of shares merged at once

_RUN_TIME = [
    "query_stride_b", "query_stride_h", "query_stride_q", "mask_stride_b", "mask_stride_q",
    "spans_stride_b", "scaling", "softcap", "lowest", "num_heads", "num_groups", "num_query",
    "num_keys", "num_rows", "num_parts",
]  # fmt: skip
# The pointers and strides of keys and values are not listed: Triton uses 16-byte loads only if it
# knows that they are divisible by 16.
_SMALL = ["query_ptr", "mask_ptr", "spans_ptr", "sinks_ptr"]

_entry_point = partial(
    triton.jit, do_not_specialize=_RUN_TIME, do_not_specialize_on_alignment=_SMALL
)


@_entry_point
def key_spans_kernel(
    mask_ptr, spans_ptr, mask_stride_b, mask_stride_q, num_query, num_keys, lowest
):
    """Write the visible span of each row in a mask, int32 [B, Q, 2]. Grid: (B, Q)."""
    sequence, token = tl.program_id(0), tl.program_id(1)
    row_ptr = mask_ptr + sequence.to(tl.int64) * mask_stride_b + token.to(tl.int64) * mask_stride_q
    first, end = token * 0 + NOWHERE, token * 0
    for start in range(0, num_keys, SPAN_COLUMNS):
        columns = start + tl.arange(0, SPAN_COLUMNS)
        x = tl.load(row_ptr + columns, mask=columns < num_keys, other=float("-inf")).to(tl.float32)
        is_hidden = x <= lowest  # False for NaN
        first = tl.minimum(first, tl.min(tl.where(is_hidden, NOWHERE, columns), axis=0))
        end = tl.maximum(end, tl.max(tl.where(is_hidden, 0, columns + 1), axis=0))
    at = spans_ptr + (sequence.to(tl.int64) * num_query + token) * 2
    tl.store(at, tl.minimum(first, end))
    tl.store(at + 1, end)


@_entry_point
def attend_kernel(
    query_ptr, key_ptr, value_ptr, spans_ptr, parts_ptr, stats_ptr,
    query_stride_b, query_stride_h, query_stride_q, key_stride_b, key_stride_h, key_stride_t,
    value_stride_b, value_stride_h, value_stride_t, spans_stride_b,
    scaling, softcap, num_heads, num_groups, num_query, num_rows, num_parts,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the weighted values, tops and sums for one share.

    Grid: (B * H, tiles of rows, shares).
    """
    sequence, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    sequence, head = sequence.to(tl.int64), head.to(tl.int64)
    part, rows = tl.program_id(2), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_groups * num_query
    tokens, query_heads = rows % num_query, head * num_groups + rows // num_query
    entries = tl.arange(0, PADDED_WIDTH)
    is_entry = entries < WIDTH

    spans = spans_ptr + sequence * spans_stride_b + tokens * 2
    first = tl.load(spans, mask=is_row, other=0)
    end = tl.load(spans + 1, mask=is_row, other=0)
    # This program's share of the columns that any of its rows sees.
    sees = end > first
    lowest, stop = (
        tl.min(tl.where(sees, first, NOWHERE), axis=0),
        tl.max(tl.where(sees, end, 0), axis=0),
    )
    num_blocks = tl.cdiv(tl.maximum(stop - lowest, 0), COLUMNS)
    share = tl.cdiv(num_blocks, num_parts) * COLUMNS
    begin = tl.minimum(lowest + part * share, stop)
    stop = tl.minimum(begin + share, stop)

    query_at = (
        sequence * query_stride_b
        + query_heads * query_stride_h
        + tokens.to(tl.int64) * query_stride_q
    )
    query = tl.load(
        query_ptr + query_at[:, None] + entries[None, :], is_row[:, None] & is_entry[None, :], 0.0
    )
    keys = key_ptr + sequence * key_stride_b + head * key_stride_h
    values = value_ptr + sequence * value_stride_b + head * value_stride_h
    offsets = tl.arange(0, COLUMNS)[:, None]
    key_offsets = offsets * key_stride_t + entries[None, :]
    value_offsets = offsets * value_stride_t + entries[None, :]

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, PADDED_WIDTH], tl.float32)
    for start in range(begin, stop, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        # Columns outside the share are not read. An unseen column may hold NaN, and NaN times a
        # weight of 0 is NaN.
        is_read = (columns < stop)[:, None] & is_entry[None, :]
        key = tl.load(keys + tl.cast(start, tl.int64) * key_stride_t + key_offsets, is_read, 0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
        if softcap is not None:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        is_seen = (columns[None, :] >= first[:, None]) & (
            columns[None, :] < tl.minimum(end, stop)[:, None]
        )
        scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, axis=1)
        value = tl.load(
            values + tl.cast(start, tl.int64) * value_stride_t + value_offsets, is_read, 0.0
        )
        weighted = tl.dot(
            weights.to(value.dtype), value, weighted * shrink[:, None], input_precision="ieee"
        )
        top = new_top

    row = tl.program_id(0).to(tl.int64) * num_groups * num_query + rows
    at = part.to(tl.int64) * num_rows + row
    tl.store(stats_ptr + at, top, mask=is_row)
    tl.store(stats_ptr + tl.num_programs(2).to(tl.int64) * num_rows + at, total, mask=is_row)
    is_stored = (rows < tl.where(stop > begin, num_groups * num_query, 0))[:, None] & is_entry[
        None, :
    ]
    tl.store(parts_ptr + at[:, None] * WIDTH + entries[None, :], weighted, mask=is_stored)


@_entry_point
def merge_kernel(
    parts_ptr, stats_ptr, sinks_ptr, out_ptr, num_heads, num_groups, num_query, num_rows, num_parts,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
):  # fmt: skip
    """Merge the shares of a row into its attention output, [B, Q, g*H, D].

    Grid: (B * g * H * Q,).
    """
    row = tl.program_id(0).to(tl.int64)
    token, query_head = row % num_query, row // num_query % (num_heads * num_groups)
    sequence = row // (num_query * num_heads * num_groups)
    entries = tl.arange(0, PADDED_WIDTH)
    top = tl.full([], float("-inf"), tl.float32)
    for start in range(0, num_parts, PARTS_AT_ONCE):
        parts = start + tl.arange(0, PARTS_AT_ONCE)
        tops = tl.load(
            stats_ptr + parts.to(tl.int64) * num_rows + row, parts < num_parts, float("-inf")
        )
        top = tl.maximum(top, tl.max(tops, axis=0))
    sink = tl.full([], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + query_head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp2(sink - base)
    weighted = tl.zeros([PADDED_WIDTH], tl.float32)
    for start in range(0, num_parts, PARTS_AT_ONCE):
        parts = start + tl.arange(0, PARTS_AT_ONCE)
        at, is_part = parts.to(tl.int64) * num_rows + row, parts < num_parts
        tops = tl.load(stats_ptr + at, is_part, float("-inf"))
        sums = tl.load(stats_ptr + num_parts.to(tl.int64) * num_rows + at, is_part, 0.0)
        shrinks = tl.exp2(tops - base)
        total += tl.sum(sums * shrinks, axis=0)
        # A share without columns has written no values, and its sum is 0. A NaN sum comes from
        # columns.
        is_read = (is_part & (sums != 0.0))[:, None] & (entries < WIDTH)[None, :]
        part = tl.load(parts_ptr + at[:, None] * WIDTH + entries[None, :], is_read, 0.0)
        weighted += tl.sum(part * shrinks[:, None], axis=0)
    output = tl.where(total == 0.0, 0.0, weighted / total)
    out_row = (sequence * num_query + token) * num_heads * num_groups + query_head
    tl.store(
        out_ptr + out_row * WIDTH + entries,
        output.to(out_ptr.dtype.element_ty),
        mask=entries < WIDTH,
    )
