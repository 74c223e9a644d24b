"""Second pass over the rows: residual masses for block verification, entropies with epsilon."""

import triton.language as tl

from .acceptance import (
    MAX_LOG_RATIO,
    POSITIONS_AT_ONCE,
    combine_ratios,
    draft_logsumexps,
    load_ids,
    load_tokens,
    merge_logsumexps,
)
from .entry import entry_point
from .rows import (
    exp,
    is_finite,
    load_chunk,
    load_cutoff,
    load_cutoffs,
    load_temperature,
    row_offset,
    warp,
)
from .stats import chain_len


@entry_point
def block_ratios_kernel(
    target_ptr, target_stride_b, target_stride_i, target_stride_v,
    draft_ptr, draft_stride_b, draft_stride_i, draft_stride_v,
    ids_ptr, lens_ptr, temperature, temperatures_ptr, cutoffs_ptr,
    floats_ptr, ints_ptr, plane, draft_lse_ptr, ratios_ptr, block_lens_ptr,
    num_sequences, num_draft_tokens, vocab_size, num_chunks,
):  # fmt: skip
    """Write the log ratios for block verification; only the drafted tokens' logits are read.

    Grid: (B,). The planes of `ratios_ptr`, each [B, K], are log rho after this token, the
    log-sum-exp of the target row, and the log-sum-exp of the draft row. `block_lens_ptr` [B] is the
    number of drafted tokens before the first invalid id or row.
    """
    sequence = tl.program_id(0)
    length = chain_len(lens_ptr, sequence, num_draft_tokens)
    this_temperature = load_temperature(temperature, temperatures_ptr, sequence)
    block_len = length
    log_ratio = 0.0
    out_plane = num_sequences.to(tl.int64) * num_draft_tokens
    for first in range(0, length, POSITIONS_AT_ONCE):
        positions = first + tl.arange(0, POSITIONS_AT_ONCE)
        counts = positions < length
        ids, is_good = load_ids(ids_ptr, sequence, positions, length, num_draft_tokens, vocab_size)
        row = sequence * (num_draft_tokens + 1)
        target_lse = merge_logsumexps(
            floats_ptr, ints_ptr, plane, row, positions, counts, num_chunks
        )
        draft_lse = draft_logsumexps(
            floats_ptr, ints_ptr, plane, draft_lse_ptr, sequence, positions, counts, num_sequences,
            num_draft_tokens, num_chunks,
        )  # fmt: skip
        x = load_tokens(
            target_ptr, target_stride_b, target_stride_i, target_stride_v, sequence, positions, ids,
            is_good,
        )  # fmt: skip
        x = warp(x, this_temperature, load_cutoffs(cutoffs_ptr, row + positions, counts))
        d = load_tokens(
            draft_ptr,
            draft_stride_b,
            draft_stride_i,
            draft_stride_v,
            sequence,
            positions,
            ids,
            is_good,
        )
        is_good = is_good & is_finite(target_lse) & is_finite(draft_lse)
        gains = tl.minimum((x - target_lse) - (d - draft_lse), MAX_LOG_RATIO)
        gains = tl.where(x == float("-inf"), -MAX_LOG_RATIO, gains)
        gains = tl.where(is_good, gains, 0.0)
        sums, caps = tl.associative_scan((gains, tl.zeros_like(gains)), 0, combine_ratios)
        log_ratios = tl.minimum(log_ratio + sums, caps)
        log_ratio = tl.sum(
            tl.where(positions == first + POSITIONS_AT_ONCE - 1, log_ratios, 0.0), axis=0
        )
        block_len = tl.minimum(
            block_len, tl.min(tl.where(counts & ~is_good, positions, length), axis=0)
        )
        at = sequence.to(tl.int64) * num_draft_tokens + positions
        tl.store(ratios_ptr + at, log_ratios, mask=counts)
        tl.store(ratios_ptr + out_plane + at, target_lse, mask=counts)
        tl.store(ratios_ptr + 2 * out_plane + at, draft_lse, mask=counts)
    tl.store(block_lens_ptr + sequence, block_len)


@entry_point
def block_masses_kernel(
    target_ptr, target_stride_b, target_stride_i, target_stride_v,
    draft_ptr, draft_stride_b, draft_stride_i, draft_stride_v,
    temperature, temperatures_ptr, cutoffs_ptr, ratios_ptr, block_lens_ptr, masses_ptr,
    num_sequences, num_draft_tokens, vocab_size, num_chunks, chunks_per_program,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the chunk sums of the residuals max(rho * p - q, 0) at positions 1 .. K-1.

    Grid: (B * (K-1), programs per row). `masses_ptr` is [B, K-1, chunks].
    """
    num_pairs = num_draft_tokens - 1
    pair = tl.program_id(0)
    sequence = pair // num_pairs
    position = pair % num_pairs + 1
    if position >= tl.load(block_lens_ptr + sequence):
        return
    this_temperature = load_temperature(temperature, temperatures_ptr, sequence)
    plane = num_sequences.to(tl.int64) * num_draft_tokens
    here = sequence.to(tl.int64) * num_draft_tokens + position
    ratio = tl.exp(tl.load(ratios_ptr + here - 1))
    target_lse = tl.load(ratios_ptr + plane + here)
    draft_lse = tl.load(ratios_ptr + 2 * plane + here)
    target_row_ptr = target_ptr + row_offset(
        sequence, position, target_stride_b, target_stride_i, ROWS
    )
    draft_row_ptr = draft_ptr + row_offset(sequence, position, draft_stride_b, draft_stride_i, ROWS)
    cutoff = load_cutoff(cutoffs_ptr, sequence * (num_draft_tokens + 1) + position)
    first_chunk = tl.program_id(1) * chunks_per_program
    for chunk in range(first_chunk, tl.minimum(first_chunk + chunks_per_program, num_chunks)):
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        is_inside = token_ids < vocab_size
        x = load_chunk(target_row_ptr, target_stride_v, chunk * CHUNK, token_ids, vocab_size, ROWS)
        x = warp(x, this_temperature, cutoff)
        d = load_chunk(draft_row_ptr, draft_stride_v, chunk * CHUNK, token_ids, vocab_size, ROWS)
        residuals = tl.maximum(ratio * exp(x - target_lse) - exp(d - draft_lse), 0.0)
        mass = tl.sum(tl.where(is_inside, residuals, 0.0), axis=0)
        tl.store(masses_ptr + pair.to(tl.int64) * num_chunks + chunk, mass)


@entry_point
def entropies_kernel(
    target_ptr, target_stride_b, target_stride_i, target_stride_v,
    lens_ptr, temperature, temperatures_ptr, cutoffs_ptr, floats_ptr, ints_ptr, plane, sums_ptr,
    epsilon, num_draft_tokens, vocab_size, num_chunks, chunks_per_program,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the chunk sums of p * log(p + epsilon) to `sums_ptr` [B, K+1, chunks].

    Bonus rows are skipped. Grid: (B * (K+1), programs per row).
    """
    row = tl.program_id(0)
    sequence = row // (num_draft_tokens + 1)
    position = row % (num_draft_tokens + 1)
    if position >= chain_len(lens_ptr, sequence, num_draft_tokens):
        return
    this_temperature = load_temperature(temperature, temperatures_ptr, sequence)
    lanes = tl.arange(0, POSITIONS_AT_ONCE)
    lses = merge_logsumexps(floats_ptr, ints_ptr, plane, row, lanes, lanes == 0, num_chunks)
    lse = tl.sum(tl.where(lanes == 0, lses, 0.0), axis=0)
    cutoff = load_cutoff(cutoffs_ptr, row)
    row_ptr = target_ptr + row_offset(sequence, position, target_stride_b, target_stride_i, ROWS)
    first_chunk = tl.program_id(1) * chunks_per_program
    for chunk in range(first_chunk, tl.minimum(first_chunk + chunks_per_program, num_chunks)):
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        is_inside = token_ids < vocab_size
        x = load_chunk(row_ptr, target_stride_v, chunk * CHUNK, token_ids, vocab_size, ROWS)
        x = warp(x, this_temperature, cutoff)
        probs = exp(x - lse)
        terms = tl.where(is_inside, probs * tl.log(probs + epsilon), 0.0)
        tl.store(sums_ptr + row.to(tl.int64) * num_chunks + chunk, tl.sum(terms, axis=0))
