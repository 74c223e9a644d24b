"""First launch: compute the statistics of every chunk of every row."""

import triton
import triton.language as tl

from .entry import entry_point
from .noise import exponentials, noise_states
from .rows import (
    chunk_masses,
    chunk_max,
    chunk_race,
    first_id,
    is_finite,
    load_chunk,
    load_cutoff,
    load_temperature,
    row_offset,
    warp,
)


@triton.jit
def chain_len(lens_ptr, sequence, num_draft_tokens):
    """Return the number of valid drafted tokens of a sequence, clamped to 0..K."""
    if lens_ptr is None:
        return num_draft_tokens
    else:
        length = tl.load(lens_ptr + sequence)
        return tl.minimum(tl.maximum(length, 0), num_draft_tokens).to(tl.int32)


@triton.jit
def load_keys(seeds_ptr, rounds_ptr, positions_ptr, sequence):
    """Load the noise keys of a sequence, int64; zeros if nothing is sampled."""
    if seeds_ptr is None:
        zero = tl.zeros([], tl.int64)
        return zero, zero, zero
    else:
        return (
            tl.load(seeds_ptr + sequence),
            tl.load(rounds_ptr + sequence),
            tl.load(positions_ptr + sequence),
        )


@triton.jit
def store_chunk(
    x, token_ids, at, state, floats_ptr, ints_ptr, plane, vocab_size,
    TOP_IDS: tl.constexpr, SUMS: tl.constexpr, SPREADS: tl.constexpr, RACES: tl.constexpr,
):  # fmt: skip
    """Write the statistics of a chunk [CHUNK].

    The planes of `floats_ptr` are the maximum; with SUMS, the sum of exp(x - maximum); and with
    SPREADS, the sum of (x - maximum) exp(x - maximum), or with RACES, the largest race key. The
    planes of `ints_ptr` are, with TOP_IDS, the token id of the maximum, and with RACES, the token
    id of the largest key.
    """
    if SUMS:
        top = tl.max(x, axis=0)
        masses = chunk_masses(x, top)
        total = tl.sum(masses, axis=0)
        tl.store(floats_ptr + plane + at, total)  # NaN if the chunk has a NaN
        tl.store(floats_ptr + at, top)
    else:
        top = chunk_max(x)
        tl.store(floats_ptr + at, top)
    if TOP_IDS:
        tl.store(ints_ptr + at, first_id(x == top, token_ids, vocab_size))
    if SPREADS:
        shifts = tl.maximum(x - tl.where(is_finite(top), top, 0.0), -200.0)
        tl.store(floats_ptr + 2 * plane + at, tl.sum(shifts * masses, axis=0))
    if RACES:
        key, winner = chunk_race(masses, exponentials(state, token_ids), token_ids, vocab_size)
        tl.store(floats_ptr + 2 * plane + at, key)
        tl.store(ints_ptr + plane + at, winner)


@entry_point
def row_stats_kernel(
    target_ptr, target_stride_b, target_stride_i, target_stride_v,
    draft_ptr, draft_stride_b, draft_stride_i, draft_stride_v,
    lens_ptr, temperature, temperatures_ptr, cutoffs_ptr,
    seeds_ptr, rounds_ptr, positions_ptr,
    floats_ptr, ints_ptr, arrivals_ptr,
    num_sequences, num_draft_tokens, vocab_size, num_chunks, chunks_per_program,
    TOP_IDS: tl.constexpr, SUMS: tl.constexpr, SPREADS: tl.constexpr, RACES: tl.constexpr, STREAM:
    tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the chunk statistics of B * (K+1) target rows, then of B * K draft rows.

    Grid: (rows, programs per row). Rows past the length of a sequence are skipped, and so is the
    draft if `draft_ptr` is None. `arrivals_ptr` [B] is set to 0.
    """
    row = tl.program_id(0)
    num_positions = num_draft_tokens + 1
    num_target_rows = num_sequences * num_positions
    is_target = row < num_target_rows
    if draft_ptr is None:
        sequence = row // num_positions
        position = row % num_positions
    else:
        draft_row = tl.maximum(row - num_target_rows, 0)
        width = tl.maximum(num_draft_tokens, 1)
        sequence = tl.where(is_target, row // num_positions, draft_row // width)
        position = tl.where(is_target, row % num_positions, draft_row % width)
    if is_target & (position == 0) & (tl.program_id(1) == 0):
        tl.store(arrivals_ptr + sequence, 0)
    length = chain_len(lens_ptr, sequence, num_draft_tokens)
    last = tl.where(is_target, length, length - 1)
    if position > last:
        return
    plane = tl.num_programs(0).to(tl.int64) * num_chunks
    this_temperature = load_temperature(temperature, temperatures_ptr, sequence)
    seed, round_, first_position = load_keys(seeds_ptr, rounds_ptr, positions_ptr, sequence)
    state = noise_states(seed, round_, first_position + position, STREAM)
    first_chunk = tl.program_id(1) * chunks_per_program
    for chunk in range(first_chunk, tl.minimum(first_chunk + chunks_per_program, num_chunks)):
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        at = row.to(tl.int64) * num_chunks + chunk
        if is_target:
            target_row_ptr = target_ptr + row_offset(
                sequence, position, target_stride_b, target_stride_i, ROWS
            )
            x = load_chunk(
                target_row_ptr, target_stride_v, chunk * CHUNK, token_ids, vocab_size, ROWS
            )
            x = warp(x, this_temperature, load_cutoff(cutoffs_ptr, row))
            store_chunk(
                x, token_ids, at, state, floats_ptr, ints_ptr, plane, vocab_size, TOP_IDS, SUMS,
                SPREADS, RACES,
            )  # fmt: skip
        elif draft_ptr is not None:
            draft_row_ptr = draft_ptr + row_offset(
                sequence, position, draft_stride_b, draft_stride_i, ROWS
            )
            x = load_chunk(
                draft_row_ptr, draft_stride_v, chunk * CHUNK, token_ids, vocab_size, ROWS
            )
            store_chunk(
                x,
                token_ids,
                at,
                state,
                floats_ptr,
                ints_ptr,
                plane,
                vocab_size,
                False,
                SUMS,
                False,
                False,
            )
