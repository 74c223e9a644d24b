"""Exponential race over a row: find the entry with the largest weight / exponential number."""

import triton
import triton.language as tl

from .acceptance import POINT_MASS, TYPICAL
from .noise import exponentials, key_bounds
from .rows import NO_ID, SHIFTED, STRIDED, exp, load_chunk, pack_race, warp

# Lanes of a race held by one thread, for 16-byte loads of half precision.
LANES_AT_ONCE = tl.constexpr(8)


@triton.jit
def signed_weights(
    target_row_ptr, target_stride_v, draft_row_ptr, draft_stride_v, temperature, cutoff,
    target_lse, draft_lse, ratio, excluded_id, uses_residual, first_id, token_ids, vocab_size,
    RULE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the race weights of `token_ids`: the residual, or the target's probability.

    The residual is used if `uses_residual`. Entries without a residual take part with their negated
    probability, so one of them wins if the residual is empty.
    """
    x = load_chunk(target_row_ptr, target_stride_v, first_id, token_ids, vocab_size, ROWS)
    weights = exp(warp(x, temperature, cutoff) - target_lse)
    if RULE == POINT_MASS:
        weights = tl.where((token_ids != excluded_id) & (weights > 0.0), weights, -weights)
    elif RULE != TYPICAL:  # noqa: SIM102, one is a constant, the other a tensor
        if uses_residual:
            d = load_chunk(draft_row_ptr, draft_stride_v, first_id, token_ids, vocab_size, ROWS)
            residual = weights * ratio - exp(d - draft_lse)
            weights = tl.where(residual > 0.0, residual, -weights)
    return weights


@triton.jit
def race_row(
    target_row_ptr, target_stride_v, draft_row_ptr, draft_stride_v, temperature, cutoff,
    target_lse, draft_lse, ratio, last_id, uses_residual, state, first_piece, last_piece,
    vocab_size, RULE: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Race some pieces of one row against exponential noise; return the winner as `pack_race`.

    A key is a weight divided by an exponential number, and costs a logarithm and a division. Every
    lane therefore computes upper bounds on the keys, and keeps the entry with the largest bound and
    the second-largest bound. The keys of the kept entries decide the race. If another bound exceeds
    them, all keys are computed.
    """
    lanes = tl.arange(0, PIECE)
    excluded_id = tl.where(uses_residual, last_id, -1)
    best_bounds = tl.full([PIECE], -(2**31), tl.int32)
    other_bounds = best_bounds
    best_ids = lanes
    for piece in range(first_piece, last_piece):
        token_ids = piece * PIECE + lanes
        weights = signed_weights(
            target_row_ptr, target_stride_v, draft_row_ptr, draft_stride_v, temperature, cutoff,
            target_lse, draft_lse, ratio, excluded_id, uses_residual, piece * PIECE, token_ids,
            vocab_size, RULE, ROWS,
        )  # fmt: skip
        bounds = key_bounds(weights, state, token_ids).to(tl.int32, bitcast=True)
        is_better = bounds > best_bounds
        other_bounds = tl.maximum(other_bounds, tl.minimum(bounds, best_bounds))
        best_ids = tl.where(is_better, token_ids, best_ids)
        best_bounds = tl.maximum(bounds, best_bounds)
    ids, other_bound = merge_lanes(best_bounds, best_ids, other_bounds, PIECE)
    weights = signed_weights(
        target_row_ptr, target_stride_v, draft_row_ptr, draft_stride_v, temperature, cutoff,
        target_lse, draft_lse, ratio, excluded_id, uses_residual, 0, ids, vocab_size, RULE,
        STRIDED if ROWS == SHIFTED else ROWS,
    )  # fmt: skip
    best = tl.max(pack_race(weights / exponentials(state, ids), ids), axis=0)
    best_bits = (best >> 32).to(tl.int32)
    if (other_bound >= best_bits) & ((other_bound & NO_ID) != 0):
        best = race_all(
            target_row_ptr, target_stride_v, draft_row_ptr, draft_stride_v, temperature, cutoff,
            target_lse, draft_lse, ratio, excluded_id, uses_residual, state, first_piece,
            last_piece, vocab_size, RULE, ROWS, PIECE,
        )  # fmt: skip
    return best


@triton.jit
def race_all(
    target_row_ptr, target_stride_v, draft_row_ptr, draft_stride_v, temperature, cutoff,
    target_lse, draft_lse, ratio, excluded_id, uses_residual, state, first_piece, last_piece,
    vocab_size, RULE: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Run `race_row` with the keys of all entries."""
    lanes = tl.arange(0, PIECE)
    best_bits = tl.full([PIECE], -(2**31), tl.int32)
    best_pieces = tl.zeros([PIECE], tl.int32)
    for piece in range(first_piece, last_piece):
        token_ids = piece * PIECE + lanes
        weights = signed_weights(
            target_row_ptr, target_stride_v, draft_row_ptr, draft_stride_v, temperature, cutoff,
            target_lse, draft_lse, ratio, excluded_id, uses_residual, piece * PIECE, token_ids,
            vocab_size, RULE, ROWS,
        )  # fmt: skip
        bits = (weights / exponentials(state, token_ids)).to(tl.int32, bitcast=True)
        is_better = bits > best_bits
        best_pieces = tl.where(is_better, piece, best_pieces)
        best_bits = tl.where(is_better, bits, best_bits)
    return tl.max(
        pack_race(best_bits.to(tl.float32, bitcast=True), best_pieces * PIECE + lanes), axis=0
    )


@triton.jit
def merge_lanes(bounds, ids, other_bounds, PIECE: tl.constexpr):
    """Return the ids [PIECE / 8] of the largest of each eight neighbouring bounds.

    Also return the largest of all other bounds.
    """
    bounds = tl.reshape(bounds, [PIECE // LANES_AT_ONCE, LANES_AT_ONCE])
    ids = tl.reshape(ids, [PIECE // LANES_AT_ONCE, LANES_AT_ONCE])
    best = tl.max(bounds, axis=1)
    best_ids = tl.min(tl.where(bounds == best[:, None], ids, NO_ID), axis=1)
    is_best = ids == best_ids[:, None]
    other_bound = tl.max(tl.max(tl.where(is_best, -(2**31), bounds), axis=1), axis=0)
    return best_ids, tl.maximum(other_bound, tl.max(other_bounds, axis=0))
