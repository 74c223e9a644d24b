"""Kernel of `warp_logits`: temperature, top-k, top-p and min-p, cut at a bin of a histogram of each row."""

import triton
import triton.language as tl

from .._inputs import BINS_PER_NAT, NUM_BINS
from .entry import entry_point
from .rows import chunk_max, is_finite, load_chunk, load_temperature, row_offset, warp

BINS = tl.constexpr(NUM_BINS)
PER_NAT = tl.constexpr(float(BINS_PER_NAT))


@triton.jit
def bins_of(x, top):
    """Bin [CHUNK] int32 of each entry by its distance from the largest; the last bin holds all that are further."""
    distance = (top - x) * PER_NAT
    return tl.maximum(tl.minimum(distance, BINS - 1.0), 0.0).to(tl.int32)


@triton.jit
def last_kept_bin(counts, top_k, top_p):
    """The bin in which the last of `top_k` entries lies, or before it the one that fills up the mass `top_p`.

    Args:
        counts: [BINS] int32 entries; the last bin's are not read.
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


@entry_point
def cut_kernel(
    target_ptr, target_stride_b, target_stride_i, target_stride_v, temperature, temperatures_ptr,
    top_k, top_p, most_below, out_ptr, vocab_size, num_chunks, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write each row's logits over its temperature, -inf where they are cut, float32 [B, V]. Grid: (B,)."""
    row = tl.program_id(0)
    this_temperature = load_temperature(temperature, temperatures_ptr, row)
    row_ptr = target_ptr + row_offset(row, tl.program_id(1), target_stride_b, target_stride_i, ROWS)
    top = tl.full([], float("-inf"), tl.float32)
    num_nans = row * 0
    for chunk in range(num_chunks):
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_chunk(row_ptr, target_stride_v, chunk * CHUNK, token_ids, vocab_size, ROWS)
        here = chunk_max(warp(x, this_temperature, None))
        num_nans += tl.where(here != here, 1, 0)
        top = tl.maximum(top, here)
    is_valid = tl.where(num_nans > 0, 0, tl.where(is_finite(top), 1, 0))
    counts = tl.zeros([BINS], tl.int32)
    for chunk in range(num_chunks):
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_chunk(row_ptr, target_stride_v, chunk * CHUNK, token_ids, vocab_size, ROWS)
        x = warp(x, this_temperature, None)
        counts += tl.histogram(bins_of(x, top), BINS)
    last = last_kept_bin(counts, top_k, top_p)
    for chunk in range(num_chunks):
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_chunk(row_ptr, target_stride_v, chunk * CHUNK, token_ids, vocab_size, ROWS)
        x = warp(x, this_temperature, None)
        is_kept = (bins_of(x, top) <= last) & (top - x <= most_below)
        x = tl.where(is_kept, x, tl.where(is_valid > 0, float("-inf"), x))
        tl.store(out_ptr + row.to(tl.int64) * vocab_size + token_ids, x, mask=token_ids < vocab_size)
