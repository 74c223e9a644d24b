"""Acceptance tests for drafted tokens.

The rules are rejection sampling, typical acceptance and block verification.
"""

import triton
import triton.language as tl

from .noise import ACCEPT, noise_states, uniforms
from .rows import is_finite, logsumexps, merge_plain_sums, merge_rows, merge_spreads

# Verification rules; each kernel is compiled for one rule.
GREEDY = tl.constexpr(0)
REJECTION = tl.constexpr(1)
POINT_MASS = tl.constexpr(2)
TYPICAL = tl.constexpr(3)
BLOCK = tl.constexpr(4)
COUPLED = tl.constexpr(5)

# Positions tested in one step. All kernels merge rows in this shape, so their results are bitwise
# equal.
POSITIONS_AT_ONCE = tl.constexpr(8)
# Replaces a log ratio of +inf. A sum of 128 such ratios does not overflow, and other ratios cannot
# undo it.
MAX_LOG_RATIO = tl.constexpr(1e30)


@triton.jit
def load_ids(ids_ptr, sequence, positions, length, num_draft_tokens, vocab_size):
    """Load drafted ids [P] int32, and whether they are within the length and in [0, V).

    All other ids are set to 0.
    """
    counts = positions < length
    ids = tl.load(
        ids_ptr + sequence.to(tl.int64) * num_draft_tokens + positions, mask=counts, other=-1
    ).to(tl.int64)
    is_good = counts & (ids >= 0) & (ids < vocab_size)
    return tl.where(is_good, ids, 0).to(tl.int32), is_good


@triton.jit
def load_tokens(logits_ptr, stride_b, stride_i, stride_v, sequence, positions, ids, mask):
    """Load logits [P] float32 of one token per position."""
    at = (
        sequence.to(tl.int64) * stride_b
        + positions.to(tl.int64) * stride_i
        + ids.to(tl.int64) * stride_v
    )
    return tl.load(logits_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def merge_logsumexps(floats_ptr, ints_ptr, plane, first_row, lanes, mask, num_chunks):
    """Merge the log-sum-exps [P] of rows `first_row` + `lanes` [P]."""
    tops, _, sums = merge_rows(
        floats_ptr, ints_ptr, plane, first_row, lanes, mask, num_chunks, True
    )
    return logsumexps(tops, sums)


@triton.jit
def draft_logsumexps(
    floats_ptr, ints_ptr, plane, draft_lse_ptr, sequence, positions, mask, num_sequences,
    num_draft_tokens, num_chunks,
):  # fmt: skip
    """Load the saved log-sum-exps [P] of draft rows, or merge them from their chunks.

    Chunks of the draft follow those of the target.
    """
    row = sequence.to(tl.int64) * num_draft_tokens
    if draft_lse_ptr is not None:
        return tl.load(draft_lse_ptr + row + positions, mask=mask, other=0.0)
    else:
        row += num_sequences.to(tl.int64) * (num_draft_tokens + 1)
        return merge_logsumexps(floats_ptr, ints_ptr, plane, row, positions, mask, num_chunks)


@triton.jit
def combine_ratios(sum_before, cap_before, sum_after, cap_after):
    """Compose two functions r -> min(r + sum, cap)."""
    return sum_before + sum_after, tl.minimum(cap_before + sum_after, cap_after)


@triton.jit
def passes_rejection(log_u, target_logprobs, draft_logprobs, draft_lse):
    """Return whether u < target / draft, [P] bool."""
    # A +inf in a draft row gives its other tokens a log-probability of -inf, so all of them would
    # be accepted.
    is_possible = (target_logprobs > float("-inf")) & is_finite(draft_lse)
    return is_possible & (
        (target_logprobs >= draft_logprobs) | (log_u < target_logprobs - draft_logprobs)
    )


@triton.jit
def passes_typical(
    floats_ptr, plane, entropy_sums_ptr, first_row, lanes, mask, num_chunks, tops, sums,
    target_logprobs, threshold, alpha,
):  # fmt: skip
    """Return whether the target probability exceeds the row's threshold, [P] bool."""
    if entropy_sums_ptr is None:
        spreads = merge_spreads(floats_ptr, plane, first_row, lanes, mask, num_chunks, tops)
        entropies = tl.log(sums) - spreads / sums
    else:
        entropies = -merge_plain_sums(entropy_sums_ptr, first_row, lanes, mask, num_chunks)
    return tl.exp(target_logprobs) > tl.minimum(threshold, alpha * tl.exp(-entropies))


@triton.jit
def one_minus_exp(x):
    """Compute 1 - exp(x) for x <= 0, float32, with a series near 0 to avoid cancellation."""
    series = -x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0)))))
    return tl.where(x > -0.0625, series, 1.0 - tl.exp(x))


@triton.jit
def block_end(
    ids_ptr, ratios_ptr, block_lens_ptr, masses_ptr, seed, round_, position, sequence,
    num_draft_tokens, vocab_size, num_chunks,
):  # fmt: skip
    """Return the length of the longest prefix accepted by block verification."""
    length = tl.load(block_lens_ptr + sequence)
    end = length * 0
    for first in range(0, length, POSITIONS_AT_ONCE):
        positions = first + tl.arange(0, POSITIONS_AT_ONCE)
        counts = positions < length
        is_inner = positions + 1 < length
        ids, _ = load_ids(ids_ptr, sequence, positions, length, num_draft_tokens, vocab_size)
        u = uniforms(noise_states(seed, round_, position + positions, ACCEPT), ids)
        log_ratios = tl.load(
            ratios_ptr + sequence.to(tl.int64) * num_draft_tokens + positions,
            mask=counts,
            other=0.0,
        )
        masses = merge_plain_sums(
            masses_ptr, sequence * (num_draft_tokens - 1), positions, is_inner, num_chunks
        )
        passed = tl.where(
            is_inner, u * (masses + one_minus_exp(log_ratios)) < masses, u < tl.exp(log_ratios)
        )  # fmt: skip
        passed = counts & (passed | (log_ratios >= 0.0))
        end = tl.maximum(end, tl.max(tl.where(passed, positions + 1, 0), axis=0))
    return end
