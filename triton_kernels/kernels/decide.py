"""Second launch: test the drafted tokens, sample the correction or bonus token, write the verdict."""

import triton
import triton.language as tl

from ..types import Status
from .acceptance import (
    BLOCK,
    COUPLED,
    GREEDY,
    POINT_MASS,
    POSITIONS_AT_ONCE,
    REJECTION,
    TYPICAL,
    block_end,
    draft_logsumexps,
    load_ids,
    load_tokens,
    passes_rejection,
    passes_typical,
)
from .entry import entry_point
from .noise import ACCEPT, CORRECTION, exponentials, noise_states, uniforms
from .rows import (
    CHUNKS_AT_ONCE,
    is_finite,
    load_chunk,
    load_cutoff,
    load_cutoffs,
    load_temperature,
    logsumexps,
    merge_maxes,
    merge_races,
    merge_sums,
    pack_race,
    row_offset,
    row_status,
    unpack_race,
    warp,
)
from .stats import chain_len, load_keys

BAD_DRAFT_ID = tl.constexpr(int(Status.BAD_DRAFT_ID))
EMPTY_RESIDUAL = tl.constexpr(int(Status.EMPTY_RESIDUAL))


@triton.jit
def first_lane(values):
    """First entry of [P], as a scalar."""
    return tl.sum(tl.where(tl.arange(0, POSITIONS_AT_ONCE) == 0, values, tl.zeros_like(values)), axis=0)


@triton.jit
def write_verdict(ids_ptr, out_ids_ptr, out_num_ptr, out_status_ptr, sequence, num_draft_tokens, end, final_id, status):
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
    """Write the verdict; the final id is `argmax_id` if >= 0, else the winner of the programs' races."""
    best = tl.full([], -(2**63), tl.int64)
    for first in range(0, num_programs, CHUNKS_AT_ONCE):
        programs = first + tl.arange(0, CHUNKS_AT_ONCE)
        at = races_ptr + sequence.to(tl.int64) * num_programs + programs
        races = tl.load(at, mask=programs < num_programs, other=-(2**63), cache_modifier=".cg")
        best = tl.maximum(best, tl.max(races, axis=0))
    bits, winner = unpack_race(best, vocab_size)
    status |= tl.where((uses_residual != 0) & (bits < 0), EMPTY_RESIDUAL, 0)
    final_id = tl.where(argmax_id >= 0, argmax_id, winner)
    write_verdict(ids_ptr, out_ids_ptr, out_num_ptr, out_status_ptr, sequence, num_draft_tokens, end, final_id, status)


@triton.jit
def first_rejection(
    target_ptr, target_stride_b, target_stride_i, target_stride_v,
    draft_ptr, draft_stride_b, draft_stride_i, draft_stride_v,
    ids_ptr, takes_argmax, temperature, cutoffs_ptr, seed, round_, position,
    floats_ptr, ints_ptr, plane, draft_lse_ptr, entropy_sums_ptr, threshold, alpha, passed_ptr,
    sequence, length, num_sequences, num_draft_tokens, vocab_size, num_chunks, RULE: tl.constexpr,
):  # fmt: skip
    """Position of the first drafted token that RULE rejects; `length` if all pass."""
    end = length
    for first in range(0, length, POSITIONS_AT_ONCE):
        positions = first + tl.arange(0, POSITIONS_AT_ONCE)
        counts = positions < length
        ids, is_good = load_ids(ids_ptr, sequence, positions, length, num_draft_tokens, vocab_size)
        rows = sequence.to(tl.int64) * (num_draft_tokens + 1) + positions
        tops, top_ids = merge_maxes(floats_ptr, ints_ptr, rows, counts, num_chunks)
        is_argmax = (top_ids == ids) & is_finite(tops)
        if RULE == GREEDY:
            passed = is_argmax
        elif RULE == COUPLED:
            winners = merge_races(floats_ptr, floats_ptr + 2 * plane, ints_ptr + plane, rows, counts, num_chunks, tops)
            passed = (winners == ids) & is_finite(tops)
        else:
            sums = merge_sums(floats_ptr, floats_ptr + plane, rows, counts, num_chunks, tops)
            x = load_tokens(target_ptr, target_stride_b, target_stride_i, target_stride_v, sequence, positions, ids,
                            is_good)  # fmt: skip
            target_logprobs = warp(x, temperature, load_cutoffs(cutoffs_ptr, rows, counts))
            target_logprobs -= logsumexps(tops, sums)
            if RULE == TYPICAL:
                passed = passes_typical(floats_ptr, plane, entropy_sums_ptr, rows, counts, num_chunks, tops, sums,
                                        target_logprobs, threshold, alpha)  # fmt: skip
            else:
                log_u = tl.log(uniforms(noise_states(seed, round_, position + positions, ACCEPT), ids))
                passed = log_u < target_logprobs
                if RULE == REJECTION:
                    draft_lse = draft_logsumexps(floats_ptr, ints_ptr, draft_lse_ptr, sequence, positions, counts,
                                                 num_sequences, num_draft_tokens, num_chunks, plane)  # fmt: skip
                    d = load_tokens(draft_ptr, draft_stride_b, draft_stride_i, draft_stride_v, sequence, positions, ids,
                                    is_good)  # fmt: skip
                    passed = passes_rejection(log_u, target_logprobs, d - draft_lse, draft_lse)
        passed = tl.where(takes_argmax, is_argmax, passed) & is_good
        if passed_ptr is not None:
            at = sequence.to(tl.int64) * num_draft_tokens + positions
            tl.store(passed_ptr + at, passed.to(tl.int8), mask=counts)
        end = tl.minimum(end, tl.min(tl.where(counts & ~passed, positions, length), axis=0))
    return end


@triton.jit
def race_row(
    target_row_ptr, target_stride_v, draft_row_ptr, draft_stride_v, temperature, cutoff,
    target_lse, draft_lse, ratio, last_id, uses_residual, state, first_piece, last_piece, vocab_size,
    RULE: tl.constexpr, ALIGNED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Exponential race over some pieces of one row, packed by `pack_race`.

    The race is that of the residual or, unless `uses_residual`, of the target distribution. Entries without a residual
    take part with their negated key under the target: one of them wins if the residual is empty. Every thread keeps the
    best of its entries, and one reduction at the end merges them.
    """
    lanes = tl.arange(0, PIECE)
    best_bits = tl.full([PIECE], -(2**31), tl.int32)
    best_ids = lanes
    excluded_id = tl.where(uses_residual, last_id, -1)
    for piece in range(first_piece, last_piece):
        token_ids = piece * PIECE + lanes
        x = load_chunk(target_row_ptr, target_stride_v, token_ids, vocab_size, ALIGNED)
        weights = tl.exp(warp(x, temperature, cutoff) - target_lse)
        is_left = token_ids >= 0
        if RULE == POINT_MASS:
            is_left = (token_ids != excluded_id) & (weights > 0.0)
        elif RULE != TYPICAL:  # noqa: SIM102, the one is a constant, the other a tensor
            if uses_residual:
                d = load_chunk(draft_row_ptr, draft_stride_v, token_ids, vocab_size, ALIGNED)
                residual = weights * ratio - tl.exp(d - draft_lse)
                is_left = residual > 0.0
                weights = tl.where(is_left, residual, weights)
        keys = weights / exponentials(state, token_ids)
        bits = tl.where(is_left, keys, -keys).to(tl.int32, bitcast=True)
        is_better = bits > best_bits
        best_ids = tl.where(is_better, token_ids, best_ids)
        best_bits = tl.where(is_better, bits, best_bits)
    return tl.max(pack_race(best_bits.to(tl.float32, bitcast=True), best_ids), axis=0)


@entry_point
def decide_kernel(
    target_ptr, target_stride_b, target_stride_i, target_stride_v,
    draft_ptr, draft_stride_b, draft_stride_i, draft_stride_v,
    ids_ptr, lens_ptr, temperature, temperatures_ptr, cutoffs_ptr,
    seeds_ptr, rounds_ptr, positions_ptr,
    floats_ptr, ints_ptr, plane, draft_lse_ptr, entropy_sums_ptr, ratios_ptr, block_lens_ptr, masses_ptr,
    threshold, alpha,
    races_ptr, plans_ptr, arrivals_ptr,
    out_ids_ptr, out_num_ptr, out_status_ptr, passed_ptr,
    num_sequences, num_draft_tokens, vocab_size, num_chunks, pieces_per_program,
    RULE: tl.constexpr, RACES: tl.constexpr, FUSED: tl.constexpr, ALIGNED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Verify one sequence.

    Grid: (B, programs per row). With RACES, every program tests the chain by itself and races its pieces of the row of
    the final token. If FUSED, the last program to finish merges the races and writes the verdict; otherwise
    `finish_kernel` does, from `plans_ptr` [B, 4].
    """
    sequence = tl.program_id(0)
    program = tl.program_id(1)
    length = chain_len(lens_ptr, sequence, num_draft_tokens)
    this_temperature = load_temperature(temperature, temperatures_ptr, sequence)
    takes_argmax = tl.full([], 0, tl.int1)  # the compiler then drops the ids of the maxima, which nobody stored
    if temperatures_ptr is not None:
        takes_argmax = this_temperature == 0.0
    seed, round_, position = load_keys(seeds_ptr, rounds_ptr, positions_ptr, sequence)
    end = length * 0
    position_rule: tl.constexpr = GREEDY if RULE == BLOCK else RULE
    if RULE != BLOCK or temperatures_ptr is not None:  # block verification tests only rows at temperature 0 here
        end = first_rejection(
            target_ptr, target_stride_b, target_stride_i, target_stride_v,
            draft_ptr, draft_stride_b, draft_stride_i, draft_stride_v,
            ids_ptr, takes_argmax, this_temperature, cutoffs_ptr, seed, round_, position,
            floats_ptr, ints_ptr, plane, draft_lse_ptr, entropy_sums_ptr, threshold, alpha, passed_ptr,
            sequence, length, num_sequences, num_draft_tokens, vocab_size, num_chunks, position_rule,
        )  # fmt: skip
    ratio = 1.0
    if RULE == BLOCK:
        block_len = block_end(ids_ptr, ratios_ptr, block_lens_ptr, masses_ptr, seed, round_, position, sequence,
                              num_draft_tokens, vocab_size, num_chunks)  # fmt: skip
        end = tl.where(takes_argmax, end, block_len)
        at = sequence.to(tl.int64) * num_draft_tokens + tl.maximum(end - 1, 0)
        ratio = tl.exp(tl.load(ratios_ptr + at, mask=end > 0, other=0.0))

    lanes = tl.arange(0, POSITIONS_AT_ONCE)
    last = end + tl.zeros_like(lanes)
    row = sequence * (num_draft_tokens + 1) + end
    rows = row.to(tl.int64) + tl.zeros_like(lanes)
    tops, top_ids = merge_maxes(floats_ptr, ints_ptr, rows, lanes == 0, num_chunks)
    top = first_lane(tops)
    final_id = first_lane(top_ids)
    last_ids, are_good = load_ids(ids_ptr, sequence, last, length, num_draft_tokens, vocab_size)
    is_rejected = first_lane(are_good.to(tl.int32)) > 0
    status = row_status(top) | tl.where((end < length) & ~is_rejected, BAD_DRAFT_ID, 0)
    if RULE == COUPLED:
        winners = merge_races(floats_ptr, floats_ptr + 2 * plane, ints_ptr + plane, rows, lanes == 0, num_chunks, tops)
        final_id = tl.where(takes_argmax, final_id, first_lane(winners))
    if not RACES:
        write_verdict(ids_ptr, out_ids_ptr, out_num_ptr, out_status_ptr, sequence, num_draft_tokens, end, final_id,
                      status)  # fmt: skip
    else:
        sums = merge_sums(floats_ptr, floats_ptr + plane, rows, lanes == 0, num_chunks, tops)
        uses_residual = is_rejected & is_finite(top) & ~takes_argmax
        draft_lse = 0.0
        draft_row_ptr = target_ptr
        if RULE == REJECTION or RULE == BLOCK:  # noqa: SIM109, Triton compares with one value at a time
            lses = draft_logsumexps(floats_ptr, ints_ptr, draft_lse_ptr, sequence, last, (lanes == 0) & are_good,
                                    num_sequences, num_draft_tokens, num_chunks, plane)  # fmt: skip
            draft_lse = first_lane(lses)
            status |= tl.where(is_rejected & ~takes_argmax, row_status(draft_lse), 0)
            uses_residual = uses_residual & is_finite(draft_lse)
            draft_row_ptr = draft_ptr + row_offset(sequence, end, draft_stride_b, draft_stride_i, ALIGNED)
        if RULE == TYPICAL:
            uses_residual = uses_residual & (end < 0)
        first_piece = program * pieces_per_program
        num_pieces = (vocab_size + PIECE - 1) // PIECE
        last_piece = tl.where(takes_argmax, first_piece, tl.minimum(first_piece + pieces_per_program, num_pieces))
        best = race_row(
            target_ptr + row_offset(sequence, end, target_stride_b, target_stride_i, ALIGNED), target_stride_v,
            draft_row_ptr, draft_stride_v, this_temperature, load_cutoff(cutoffs_ptr, row),
            first_lane(logsumexps(tops, sums)),
            draft_lse, ratio, first_lane(last_ids), uses_residual,
            noise_states(seed, round_, position + end, CORRECTION), first_piece, last_piece, vocab_size,
            RULE, ALIGNED, PIECE,
        )  # fmt: skip
        num_programs = tl.num_programs(1)
        tl.store(races_ptr + sequence.to(tl.int64) * num_programs + program, best)
        argmax_id = tl.where(takes_argmax, final_id, -1)
        if FUSED:
            tl.debug_barrier()  # all threads have stored their results before the counter is incremented
            num_before = tl.atomic_add(arrivals_ptr + sequence, 1, sem="acq_rel")
            if num_before == num_programs - 1:
                tl.debug_barrier()
                finish(ids_ptr, races_ptr, out_ids_ptr, out_num_ptr, out_status_ptr, sequence, num_draft_tokens,
                       vocab_size, num_programs, end, argmax_id, uses_residual.to(tl.int32), status)  # fmt: skip
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
    """Write the verdicts from the `plans_ptr` of `decide_kernel`. Grid: (B,)."""
    sequence = tl.program_id(0)
    end = tl.load(plans_ptr + 4 * sequence)
    argmax_id = tl.load(plans_ptr + 4 * sequence + 1)
    uses_residual = tl.load(plans_ptr + 4 * sequence + 2)
    status = tl.load(plans_ptr + 4 * sequence + 3)
    finish(ids_ptr, races_ptr, out_ids_ptr, out_num_ptr, out_status_ptr, sequence, num_draft_tokens, vocab_size,
           num_programs, end, argmax_id, uses_residual, status)  # fmt: skip
