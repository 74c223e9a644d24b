"""Kernels for `warp_logits`: temperature, top-k, top-p and min-p.

A row is cut at a bin of its histogram. Each of three launches runs one program per chunk of a row;
the last launch may also draw a token. With only one launch, a single program would read the whole
row, which took 0.46 ms for V = 151,936 on an H100, or 12 microseconds per chunk.
"""

import triton
import triton.language as tl

from .._inputs import BINS_PER_NAT, NUM_BINS
from .acceptance import POSITIONS_AT_ONCE
from .entry import entry_point
from .noise import noise_states
from .rows import (
    CHUNKS_AT_ONCE,
    chunk_max,
    is_finite,
    load_chunk,
    load_temperature,
    logsumexps,
    merge_races,
    merge_rows,
    row_offset,
    warp,
)
from .stats import load_keys, store_chunk

BINS = tl.constexpr(NUM_BINS)
PER_NAT = tl.constexpr(float(BINS_PER_NAT))


@triton.jit
def bins_of(x, top):
    """Return the bin [CHUNK] int32 of each entry, by its distance from the largest entry.

    The last bin also holds all larger distances.
    """
    distance = (top - x) * PER_NAT
    return tl.maximum(tl.minimum(distance, BINS - 1.0), 0.0).to(tl.int32)


@triton.jit
def last_kept_bin(counts, top_k, top_p):
    """Return the bin of the last entry kept by `top_k` and `top_p`.

    Args:
        counts: [BINS] int32, number of entries per bin; the last bin is not read.
        top_k: entries to keep.
        top_p: share of the mass to keep; above 1: all.
    """
    bins = tl.arange(0, BINS)
    counts = tl.where(bins == BINS - 1, 0, counts)
    is_kept = (tl.cumsum(counts, axis=0) - counts) < top_k
    masses = counts.to(tl.float32) * tl.exp(-(bins.to(tl.float32) + 0.5) / PER_NAT)
    masses = tl.where(is_kept, masses, 0.0)
    is_kept = is_kept & (tl.cumsum(masses, axis=0) - masses < top_p * tl.sum(masses, axis=0))
    return tl.sum(is_kept.to(tl.int32), axis=0) - 1


@triton.jit
def row_top(floats_ptr, row, num_chunks):
    """Return the largest entry of a row other than NaN, and whether the row is valid, as int32.

    A valid row has a finite maximum and no NaN.
    """
    top = tl.full([], float("-inf"), tl.float32)
    num_nans = row * 0
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        at = floats_ptr + row.to(tl.int64) * num_chunks + chunks
        tops = tl.load(at, mask=chunks < num_chunks, other=float("-inf"))
        num_nans += tl.sum((tops != tops).to(tl.int32), axis=0)
        top = tl.maximum(top, tl.max(tl.where(tops != tops, float("-inf"), tops), axis=0))
    return top, tl.where(num_nans > 0, 0, tl.where(is_finite(top), 1, 0))


@triton.jit
def warped_chunk(
    target_ptr, target_stride_b, target_stride_v, temperature, temperatures_ptr, vocab_size,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Load this program's chunk of logits, divided by the temperature, and their token ids.

    Both are [CHUNK].
    """
    row, first_id = tl.program_id(0), tl.program_id(1) * CHUNK
    token_ids = first_id + tl.arange(0, CHUNK)
    row_ptr = target_ptr + row_offset(row, row * 0, target_stride_b, 0, ROWS)
    x = load_chunk(row_ptr, target_stride_v, first_id, token_ids, vocab_size, ROWS)
    return warp(x, load_temperature(temperature, temperatures_ptr, row), None), token_ids


@entry_point
def cut_tops_kernel(
    target_ptr, target_stride_b, target_stride_v, temperature, temperatures_ptr, floats_ptr,
    counts_ptr, arrivals_ptr, vocab_size, num_chunks, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the largest entry of each chunk, and set the counts and arrivals to 0.

    Grid: (B, chunks).
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    x, _ = warped_chunk(
        target_ptr,
        target_stride_b,
        target_stride_v,
        temperature,
        temperatures_ptr,
        vocab_size,
        ROWS,
        CHUNK,
    )
    tl.store(floats_ptr + row.to(tl.int64) * num_chunks + chunk, chunk_max(x))
    if chunk == 0:
        tl.store(
            counts_ptr + row.to(tl.int64) * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32)
        )
        if arrivals_ptr is not None:
            tl.store(arrivals_ptr + row, 0)


@entry_point
def cut_counts_kernel(
    target_ptr, target_stride_b, target_stride_v, temperature, temperatures_ptr, floats_ptr,
    counts_ptr, vocab_size, num_chunks, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count each chunk's entries by bin, into int32 [B, BINS]. Grid: (B, chunks)."""
    row = tl.program_id(0)
    top, _ = row_top(floats_ptr, row, num_chunks)
    x, _ = warped_chunk(
        target_ptr,
        target_stride_b,
        target_stride_v,
        temperature,
        temperatures_ptr,
        vocab_size,
        ROWS,
        CHUNK,
    )
    counts = tl.histogram(bins_of(x, top), BINS)
    tl.atomic_add(
        counts_ptr + row.to(tl.int64) * BINS + tl.arange(0, BINS),
        counts,
        mask=counts > 0,
        sem="relaxed",
    )


@triton.jit
def cut_chunk(
    target_ptr, target_stride_b, target_stride_v, temperature, temperatures_ptr, floats_ptr,
    counts_ptr, top_k, top_p, most_below, vocab_size, num_chunks, ROWS: tl.constexpr, CHUNK:
    tl.constexpr,
):  # fmt: skip
    """Return `warped_chunk` with -inf for dropped logits.

    The cut is computed from the chunk maxima and bin counts.
    """
    row = tl.program_id(0)
    top, is_valid = row_top(floats_ptr, row, num_chunks)
    last = last_kept_bin(
        tl.load(counts_ptr + row.to(tl.int64) * BINS + tl.arange(0, BINS)), top_k, top_p
    )
    x, token_ids = warped_chunk(
        target_ptr,
        target_stride_b,
        target_stride_v,
        temperature,
        temperatures_ptr,
        vocab_size,
        ROWS,
        CHUNK,
    )
    is_kept = (bins_of(x, top) <= last) & (top - x <= most_below)
    return tl.where(is_kept, x, tl.where(is_valid > 0, float("-inf"), x)), token_ids


@entry_point
def cut_kernel(
    target_ptr, target_stride_b, target_stride_v, temperature, temperatures_ptr, floats_ptr,
    counts_ptr, top_k, top_p, most_below, out_ptr, vocab_size, num_chunks, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write each row's logits divided by its temperature, -inf if dropped, float32 [B, V].

    Grid: (B, chunks).
    """
    x, token_ids = cut_chunk(
        target_ptr, target_stride_b, target_stride_v, temperature, temperatures_ptr, floats_ptr,
        counts_ptr, top_k, top_p, most_below, vocab_size, num_chunks, ROWS, CHUNK,
    )  # fmt: skip
    tl.store(
        out_ptr + tl.program_id(0).to(tl.int64) * vocab_size + token_ids,
        x,
        mask=token_ids < vocab_size,
    )


@entry_point
def cut_draw_kernel(
    target_ptr, target_stride_b, target_stride_v, temperature, temperatures_ptr, floats_ptr,
    ints_ptr, plane, counts_ptr, arrivals_ptr, top_k, top_p, most_below, seeds_ptr, rounds_ptr,
    positions_ptr, draw, out_ptr, out_stride_b, out_ids_ptr, out_lse_ptr, out_lse_stride_b,
    vocab_size, num_chunks, STREAM: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the result of `cut_kernel`, and the id and log-sum-exp of `sample` for it.

    Grid: (B, chunks). `draw` is added to the keys' positions. The first plane of `floats_ptr` holds
    the maxima from `cut_tops_kernel`, and the next three hold race results as in
    `row_stats_kernel`. The last program of a row to finish merges the chunks.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    x, token_ids = cut_chunk(
        target_ptr, target_stride_b, target_stride_v, temperature, temperatures_ptr, floats_ptr,
        counts_ptr, top_k, top_p, most_below, vocab_size, num_chunks, ROWS, CHUNK,
    )  # fmt: skip
    tl.store(out_ptr + row.to(tl.int64) * out_stride_b + token_ids, x, mask=token_ids < vocab_size)
    seed, round_, position = load_keys(seeds_ptr, rounds_ptr, positions_ptr, row)
    state = noise_states(seed, round_, position + draw, STREAM)
    stats_ptr, at = floats_ptr + plane, row.to(tl.int64) * num_chunks + chunk
    store_chunk(
        x, token_ids, at, state, stats_ptr, ints_ptr, plane, vocab_size, False, True, False, True
    )
    tl.debug_barrier()  # all threads have stored their results before the counter is incremented
    num_before = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
    if num_before == num_chunks - 1:
        tl.debug_barrier()
        lanes = tl.arange(0, POSITIONS_AT_ONCE)
        mask = lanes == 0
        tops, _, sums = merge_rows(
            stats_ptr, ints_ptr, plane, row, lanes, mask, num_chunks, True, ".cg"
        )
        ids = merge_races(stats_ptr, ints_ptr, plane, row, lanes, mask, num_chunks, tops, ".cg")
        tl.store(out_ids_ptr + row + lanes, ids.to(tl.int64), mask=mask)
        tl.store(
            out_lse_ptr + row.to(tl.int64) * out_lse_stride_b + lanes,
            logsumexps(tops, sums),
            mask=mask,
        )
