"""Second launch: test the drafted tokens, sample the final token, and write the verdict."""

import triton
import triton.language as tl

from ..types import Status
from .acceptance import (
    BLOCK,
    COUPLED,
    GREEDY,
    POSITIONS_AT_ONCE,
    REJECTION,
    TYPICAL,
    block_end,
    draft_logsumexps,
    load_ids,
    load_tokens,
    merge_logsumexps,
    passes_rejection,
    passes_typical,
)
from .entry import entry_point
from .noise import ACCEPT, CORRECTION, noise_states, uniforms
from .race import race_row
from .rows import (
    CHUNKS_AT_ONCE,
    is_finite,
    load_cutoff,
    load_cutoffs,
    load_temperature,
    logsumexps,
    merge_races,
    merge_rows,
    row_offset,
    row_status,
    unpack_race,
    warp,
)
from .stats import chain_len, load_keys

BAD_DRAFT_ID = tl.constexpr(int(Status.BAD_DRAFT_ID))
EMPTY_RESIDUAL = tl.constexpr(int(Status.EMPTY_RESIDUAL))


@triton.jit
def lane_of(values, is_lane):
    """Return the entry of [P] in the lane where `is_lane` is true, as a scalar; 0 if none is."""
    return tl.sum(tl.where(is_lane, values, tl.zeros_like(values)), axis=0)


@triton.jit
def write_verdict(
    ids_ptr,
    out_ids_ptr,
    out_num_ptr,
    out_status_ptr,
    sequence,
    num_draft_tokens,
    end,
    final_id,
    status,
):
    """Write the ids (accepted, final, then -1), the number of accepted tokens and the status."""
    for first in range(0, num_draft_tokens + 1, POSITIONS_AT_ONCE):
        positions = first + tl.arange(0, POSITIONS_AT_ONCE)
        at = ids_ptr + sequence.to(tl.int64) * num_draft_tokens + positions
        drafted = tl.load(at, mask=positions < end, other=-1)
        ids = tl.where(positions == end, final_id.to(tl.int64), drafted.to(tl.int64))
        at = out_ids_ptr + sequence.to(tl.int64) * (num_draft_tokens + 1) + positions
        tl.store(at, ids, mask=positions <= num_draft_tokens)
    tl.store(out_num_ptr + sequence, end)
    tl.store(out_status_ptr + sequence, status)


@triton.jit
def finish(
    ids_ptr, races_ptr, out_ids_ptr, out_num_ptr, out_status_ptr,
    sequence, num_draft_tokens, vocab_size, num_programs, end, argmax_id, uses_residual, status,
):  # fmt: skip
    """Write the verdict.

    The final id is `argmax_id` if >= 0, else the winner of the programs' races.
    """
    best = tl.full([], -(2**63), tl.int64)
    for first in range(0, num_programs, CHUNKS_AT_ONCE):
        programs = first + tl.arange(0, CHUNKS_AT_ONCE)
        at = races_ptr + sequence.to(tl.int64) * num_programs + programs
        races = tl.load(at, mask=programs < num_programs, other=-(2**63), cache_modifier=".cg")
        best = tl.maximum(best, tl.max(races, axis=0))
    bits, winner = unpack_race(best, vocab_size)
    status |= tl.where((uses_residual != 0) & (bits < 0), EMPTY_RESIDUAL, 0)
    final_id = tl.where(argmax_id >= 0, argmax_id, winner)
    write_verdict(
        ids_ptr,
        out_ids_ptr,
        out_num_ptr,
        out_status_ptr,
        sequence,
        num_draft_tokens,
        end,
        final_id,
        status,
    )


@triton.jit
def walk_chain(
    target_ptr, target_stride_b, target_stride_i, target_stride_v,
    draft_ptr, draft_stride_b, draft_stride_i, draft_stride_v,
    ids_ptr, takes_argmax, temperature, cutoffs_ptr, seed, round_, position,
    floats_ptr, ints_ptr, plane, draft_lse_ptr, entropy_sums_ptr, threshold, alpha, passed_ptr,
    sequence, length, num_sequences, num_draft_tokens, vocab_size, num_chunks, RULE: tl.constexpr,
):  # fmt: skip
    """Find the first drafted token rejected by RULE (by GREEDY for BLOCK).

    Returns its position, or `length` if there is none; the log-sum-exps of the target (the maximum
    for GREEDY) and the draft there; the id of the maximum (of the winner for COUPLED); and the
    drafted id, or -1 if it is not in the vocabulary.
    """
    end = length
    target_lse = 0.0
    draft_lse = 0.0
    final_id = 0
    last_id = -1
    row = sequence * (num_draft_tokens + 1)
    for first in range(0, length + 1, POSITIONS_AT_ONCE):
        positions = first + tl.arange(0, POSITIONS_AT_ONCE)
        counts = positions < length
        is_row = positions <= length
        ids, is_good = load_ids(ids_ptr, sequence, positions, length, num_draft_tokens, vocab_size)
        tops, top_ids, sums = merge_rows(
            floats_ptr, ints_ptr, plane, row, positions, is_row, num_chunks, RULE != GREEDY,
        )  # fmt: skip
        lses = tops
        if RULE != GREEDY:
            lses = logsumexps(tops, sums)
        is_argmax = (top_ids == ids) & is_finite(lses)
        final_ids = top_ids
        draft_lses = tl.zeros_like(tops)
        if RULE == GREEDY or RULE == BLOCK:  # noqa: SIM109, Triton compares with one value
            passed = is_argmax
        elif RULE == COUPLED:
            winners = merge_races(
                floats_ptr, ints_ptr, plane, row, positions, is_row, num_chunks, tops
            )
            passed = (winners == ids) & is_finite(lses)
            final_ids = tl.where(takes_argmax, top_ids, winners)
        else:
            x = load_tokens(
                target_ptr, target_stride_b, target_stride_i, target_stride_v, sequence, positions,
                ids, is_good,
            )  # fmt: skip
            target_logprobs = (
                warp(x, temperature, load_cutoffs(cutoffs_ptr, row + positions, counts)) - lses
            )
            if RULE == TYPICAL:
                passed = passes_typical(
                    floats_ptr, plane, entropy_sums_ptr, row, positions, counts, num_chunks, tops,
                    sums, target_logprobs, threshold, alpha,
                )  # fmt: skip
            else:
                log_u = tl.log(
                    uniforms(noise_states(seed, round_, position + positions, ACCEPT), ids)
                )
                passed = log_u < target_logprobs
                if RULE == REJECTION:
                    draft_lses = draft_logsumexps(
                        floats_ptr, ints_ptr, plane, draft_lse_ptr, sequence, positions, counts,
                        num_sequences, num_draft_tokens, num_chunks,
                    )  # fmt: skip
                    d = load_tokens(
                        draft_ptr, draft_stride_b, draft_stride_i, draft_stride_v, sequence,
                        positions, ids, is_good,
                    )  # fmt: skip
                    passed = passes_rejection(log_u, target_logprobs, d - draft_lses, draft_lses)
        passed = tl.where(takes_argmax, is_argmax, passed) & is_good
        if passed_ptr is not None:
            at = sequence.to(tl.int64) * num_draft_tokens + positions
            tl.store(passed_ptr + at, passed.to(tl.int8), mask=counts)
        end = tl.minimum(end, tl.min(tl.where(counts & ~passed, positions, length), axis=0))
        is_end = positions == end
        is_here = (end >= first) & (end < first + POSITIONS_AT_ONCE)
        target_lse = tl.where(is_here, lane_of(lses, is_end), target_lse)
        draft_lse = tl.where(is_here, lane_of(draft_lses, is_end), draft_lse)
        final_id = tl.where(is_here, lane_of(final_ids, is_end), final_id)
        last_id = tl.where(is_here, lane_of(tl.where(is_good, ids, -1), is_end), last_id)
    return end, target_lse, draft_lse, final_id, last_id


@triton.jit
def row_at(
    ids_ptr, floats_ptr, ints_ptr, plane, draft_lse_ptr, sequence, end, length,
    num_sequences, num_draft_tokens, vocab_size, num_chunks,
):  # fmt: skip
    """Return the log-sum-exps of target and draft at position `end`, and the drafted id.

    The id is -1 if it is not in the vocabulary.
    """
    lanes = tl.arange(0, POSITIONS_AT_ONCE)
    is_lane = lanes == 0
    positions = end + lanes
    ids, is_good = load_ids(ids_ptr, sequence, positions, length, num_draft_tokens, vocab_size)
    row = sequence * (num_draft_tokens + 1)
    lses = merge_logsumexps(floats_ptr, ints_ptr, plane, row, positions, is_lane, num_chunks)
    draft_lses = draft_logsumexps(
        floats_ptr, ints_ptr, plane, draft_lse_ptr, sequence, positions, is_lane & is_good,
        num_sequences, num_draft_tokens, num_chunks,
    )  # fmt: skip
    return (
        lane_of(lses, is_lane),
        lane_of(draft_lses, is_lane),
        lane_of(tl.where(is_good, ids, -1), is_lane),
    )


@entry_point
def decide_kernel(
    target_ptr, target_stride_b, target_stride_i, target_stride_v,
    draft_ptr, draft_stride_b, draft_stride_i, draft_stride_v,
    ids_ptr, lens_ptr, temperature, temperatures_ptr, cutoffs_ptr,
    seeds_ptr, rounds_ptr, positions_ptr,
    floats_ptr, ints_ptr, plane, draft_lse_ptr, entropy_sums_ptr, ratios_ptr, block_lens_ptr,
    masses_ptr, threshold, alpha,
    races_ptr, plans_ptr, arrivals_ptr,
    out_ids_ptr, out_num_ptr, out_status_ptr, passed_ptr,
    num_sequences, num_draft_tokens, vocab_size, num_chunks, pieces_per_program,
    RULE: tl.constexpr, RACES: tl.constexpr, FUSED: tl.constexpr, ROWS: tl.constexpr, PIECE:
    tl.constexpr,
):  # fmt: skip
    """Verify one sequence.

    Grid: (B, programs per row). With RACES, every program tests the chain by itself and races its
    pieces of the final token's row. If FUSED, the last program to finish merges the races and
    writes the verdict. Otherwise `finish_kernel` writes it, from `plans_ptr` [B, 4].
    """
    sequence = tl.program_id(0)
    program = tl.program_id(1)
    length = chain_len(lens_ptr, sequence, num_draft_tokens)
    this_temperature = load_temperature(temperature, temperatures_ptr, sequence)
    # This lets the compiler drop the ids of the maxima, which were not stored.
    takes_argmax = tl.full([], 0, tl.int1)
    if temperatures_ptr is not None:
        takes_argmax = this_temperature == 0.0
    seed, round_, position = load_keys(seeds_ptr, rounds_ptr, positions_ptr, sequence)
    end, target_lse, draft_lse, final_id, last_id = walk_chain(
        target_ptr, target_stride_b, target_stride_i, target_stride_v,
        draft_ptr, draft_stride_b, draft_stride_i, draft_stride_v,
        ids_ptr, takes_argmax, this_temperature, cutoffs_ptr, seed, round_, position,
        floats_ptr, ints_ptr, plane, draft_lse_ptr, entropy_sums_ptr, threshold, alpha, passed_ptr,
        sequence, length, num_sequences, num_draft_tokens, vocab_size, num_chunks, RULE,
    )  # fmt: skip
    ratio = 1.0
    if RULE == BLOCK:
        block_len = block_end(
            ids_ptr, ratios_ptr, block_lens_ptr, masses_ptr, seed, round_, position, sequence,
            num_draft_tokens, vocab_size, num_chunks,
        )  # fmt: skip
        end = tl.where(takes_argmax, end, block_len)
        at = sequence.to(tl.int64) * num_draft_tokens + tl.maximum(end - 1, 0)
        ratio = tl.exp(tl.load(ratios_ptr + at, mask=end > 0, other=0.0))
        target_lse, draft_lse, last_id = row_at(
            ids_ptr, floats_ptr, ints_ptr, plane, draft_lse_ptr, sequence, end, length,
            num_sequences, num_draft_tokens, vocab_size, num_chunks,
        )  # fmt: skip
    is_rejected = last_id >= 0
    status = row_status(target_lse) | tl.where((end < length) & ~is_rejected, BAD_DRAFT_ID, 0)
    if not RACES:
        write_verdict(
            ids_ptr, out_ids_ptr, out_num_ptr, out_status_ptr, sequence, num_draft_tokens, end,
            final_id, status,
        )  # fmt: skip
    else:
        row = sequence * (num_draft_tokens + 1) + end
        uses_residual = is_rejected & is_finite(target_lse) & ~takes_argmax
        draft_row_ptr = target_ptr
        if RULE == REJECTION or RULE == BLOCK:  # noqa: SIM109, Triton compares with one value
            status |= tl.where(is_rejected & ~takes_argmax, row_status(draft_lse), 0)
            uses_residual = uses_residual & is_finite(draft_lse)
            draft_row_ptr = draft_ptr + row_offset(
                sequence, end, draft_stride_b, draft_stride_i, ROWS
            )
        if RULE == TYPICAL:
            uses_residual = uses_residual & (end < 0)
        first_piece = program * pieces_per_program
        num_pieces = (vocab_size + PIECE - 1) // PIECE
        last_piece = tl.where(
            takes_argmax, first_piece, tl.minimum(first_piece + pieces_per_program, num_pieces)
        )
        best = race_row(
            target_ptr + row_offset(sequence, end, target_stride_b, target_stride_i, ROWS),
            target_stride_v, draft_row_ptr, draft_stride_v, this_temperature,
            load_cutoff(cutoffs_ptr, row), target_lse, draft_lse, ratio, last_id, uses_residual,
            noise_states(seed, round_, position + end, CORRECTION), first_piece, last_piece,
            vocab_size, RULE, ROWS, PIECE,
        )  # fmt: skip
        num_programs = tl.num_programs(1)
        tl.store(races_ptr + sequence.to(tl.int64) * num_programs + program, best)
        argmax_id = tl.where(takes_argmax, final_id, -1)
        if FUSED:
            # All threads have stored their results before the counter is incremented.
            tl.debug_barrier()
            num_before = tl.atomic_add(arrivals_ptr + sequence, 1, sem="acq_rel")
            if num_before == num_programs - 1:
                tl.debug_barrier()
                finish(
                    ids_ptr, races_ptr, out_ids_ptr, out_num_ptr, out_status_ptr, sequence,
                    num_draft_tokens, vocab_size, num_programs, end, argmax_id,
                    uses_residual.to(tl.int32), status,
                )  # fmt: skip
        elif program == 0:
            tl.store(plans_ptr + 4 * sequence, end)
            tl.store(plans_ptr + 4 * sequence + 1, argmax_id)
            tl.store(plans_ptr + 4 * sequence + 2, uses_residual.to(tl.int32))
            tl.store(plans_ptr + 4 * sequence + 3, status)


@entry_point
def finish_kernel(
    ids_ptr, races_ptr, plans_ptr, out_ids_ptr, out_num_ptr, out_status_ptr,
    num_draft_tokens, vocab_size, num_programs,
):  # fmt: skip
    """Write the verdicts from `plans_ptr`, as written by `decide_kernel`. Grid: (B,)."""
    sequence = tl.program_id(0)
    end = tl.load(plans_ptr + 4 * sequence)
    argmax_id = tl.load(plans_ptr + 4 * sequence + 1)
    uses_residual = tl.load(plans_ptr + 4 * sequence + 2)
    status = tl.load(plans_ptr + 4 * sequence + 3)
    finish(
        ids_ptr, races_ptr, out_ids_ptr, out_num_ptr, out_status_ptr, sequence, num_draft_tokens,
        vocab_size, num_programs, end, argmax_id, uses_residual, status,
    )  # fmt: skip
