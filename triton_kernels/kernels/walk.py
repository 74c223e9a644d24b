"""The walk along a chain: which of its drafted tokens pass, and where it ends."""

import triton
import triton.language as tl

from .noise import ACCEPT, noise_states, uniforms
from .rows import is_finite, logsumexps, merge_maxes, merge_plain_sums, merge_spreads, merge_sums

# Which rule a kernel is built for.
GREEDY = tl.constexpr(0)
REJECTION = tl.constexpr(1)
POINT_MASS = tl.constexpr(2)
TYPICAL = tl.constexpr(3)
BLOCK = tl.constexpr(4)
COUPLED = tl.constexpr(5)

POSITIONS_AT_ONCE = tl.constexpr(8)  # judged in one step; every kernel merges rows in this shape, so with these bits
# A log ratio of +inf; no sum of 128 of them overflows, and none comes back from it.
MAX_LOG_RATIO = tl.constexpr(1e30)


@triton.jit
def load_ids(ids_ptr, sequence, positions, length, num_draft_tokens, vocab_size):
    """Drafted ids [P] int32, 0 where they do not count, and whether they count and lie in [0, V)."""
    counts = positions < length
    ids = tl.load(ids_ptr + sequence.to(tl.int64) * num_draft_tokens + positions, mask=counts, other=-1).to(tl.int64)
    is_good = counts & (ids >= 0) & (ids < vocab_size)
    return tl.where(is_good, ids, 0).to(tl.int32), is_good


@triton.jit
def load_tokens(logits_ptr, stride_b, stride_i, stride_v, sequence, positions, ids, mask):
    """Logits [P] of one token per position, float32."""
    at = sequence.to(tl.int64) * stride_b + positions.to(tl.int64) * stride_i + ids.to(tl.int64) * stride_v
    return tl.load(logits_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def row_laws(floats_ptr, ints_ptr, rows, mask, num_chunks, plane):
    """Maximum [P], its id [P], sum of masses [P] and log-sum-exp [P] of rows that have SUMS."""
    tops, top_ids = merge_maxes(floats_ptr, ints_ptr, rows, mask, num_chunks)
    sums = merge_sums(floats_ptr, floats_ptr + plane, rows, mask, num_chunks, tops)
    return tops, top_ids, sums, logsumexps(tops, sums)


@triton.jit
def draft_logsumexps(floats_ptr, ints_ptr, draft_lse_ptr, sequence, positions, mask, num_sequences, num_draft_tokens,
                     num_chunks, plane):  # fmt: skip
    """Log-sum-exp [P] of the proposal's rows: as saved, or merged from the chunks that follow the target's."""
    rows = sequence.to(tl.int64) * num_draft_tokens + positions
    if draft_lse_ptr is not None:
        return tl.load(draft_lse_ptr + rows, mask=mask, other=0.0)
    else:
        rows += num_sequences.to(tl.int64) * (num_draft_tokens + 1)
        _, _, _, lse = row_laws(floats_ptr, ints_ptr, rows, mask, num_chunks, plane)
        return lse


@triton.jit
def combine_ratios(sum_before, cap_before, sum_after, cap_after):
    """Compose r -> min(r + sum, cap) twice."""
    return sum_before + sum_after, tl.minimum(cap_before + sum_after, cap_after)


@triton.jit
def passes_rejection(log_coins, target_logprobs, draft_logprobs, draft_lse):
    """Which coins [P] fall below target / draft; bool."""
    # A +inf elsewhere in the draft's row reads as "never proposed" here, which would keep every token.
    is_possible = (target_logprobs > float("-inf")) & is_finite(draft_lse)
    return is_possible & ((target_logprobs >= draft_logprobs) | (log_coins < target_logprobs - draft_logprobs))


@triton.jit
def passes_typical(floats_ptr, plane, entropy_sums_ptr, rows, mask, num_chunks, tops, sums, target_logprobs, threshold,
                   alpha):  # fmt: skip
    """Which probabilities [P] are above their own row's threshold; bool."""
    if entropy_sums_ptr is None:
        spreads = merge_spreads(floats_ptr, floats_ptr + plane, floats_ptr + 2 * plane, rows, mask, num_chunks, tops)
        entropies = tl.log(sums) - spreads / sums
    else:
        entropies = -merge_plain_sums(entropy_sums_ptr, rows, mask, num_chunks)
    return tl.exp(target_logprobs) > tl.minimum(threshold, alpha * tl.exp(-entropies))


@triton.jit
def one_minus_exp(x):
    """1 - exp(x) of x <= 0, float32; its series where exp has eaten the digits."""
    series = -x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0)))))
    return tl.where(x > -0.0625, series, 1.0 - tl.exp(x))


@triton.jit
def block_end(ids_ptr, ratios_ptr, block_lens_ptr, masses_ptr, seed, round_, position, sequence, num_draft_tokens,
              vocab_size, num_chunks):  # fmt: skip
    """Length of the longest prefix that block verification keeps."""
    length = tl.load(block_lens_ptr + sequence)
    end = length * 0
    for first in range(0, length, POSITIONS_AT_ONCE):
        positions = first + tl.arange(0, POSITIONS_AT_ONCE)
        counts = positions < length
        is_inner = positions + 1 < length
        ids, _ = load_ids(ids_ptr, sequence, positions, length, num_draft_tokens, vocab_size)
        coins = uniforms(noise_states(seed, round_, position + positions, ACCEPT), ids)
        log_ratios = tl.load(ratios_ptr + sequence.to(tl.int64) * num_draft_tokens + positions, mask=counts, other=0.0)
        pairs = sequence.to(tl.int64) * (num_draft_tokens - 1) + positions
        masses = merge_plain_sums(masses_ptr, pairs, is_inner, num_chunks)
        passed = tl.where(
            is_inner, coins * (masses + one_minus_exp(log_ratios)) < masses, coins < tl.exp(log_ratios)
        )  # fmt: skip
        passed = counts & (passed | (log_ratios >= 0.0))
        end = tl.maximum(end, tl.max(tl.where(passed, positions + 1, 0), axis=0))
    return end
