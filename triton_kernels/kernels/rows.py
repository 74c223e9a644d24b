"""What every kernel does with a row: read a chunk of its law, weigh it, merge what its chunks gave.

A row is read in chunks of CHUNK entries. What a chunk gives does not depend on the program that read it, and chunks
are merged in their order: so no result depends on the grid.
"""

import triton
import triton.language as tl

CHUNKS_AT_ONCE = tl.constexpr(64)  # merged in one step: V up to 262,144 takes a single one
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def row_offset(sequence, position, stride_b, stride_i, ALIGNED: tl.constexpr):
    """Where a row begins, in entries, int64; ALIGNED: see `launch.is_aligned`."""
    offset = sequence.to(tl.int64) * stride_b + position.to(tl.int64) * stride_i
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset


@triton.jit
def load_chunk(row_ptr, stride_v, token_ids, vocab_size, ALIGNED: tl.constexpr):
    """Logits of `token_ids` [CHUNK] in float32, -inf past the vocabulary."""
    if ALIGNED:
        is_inside = token_ids < (vocab_size // 16) * 16  # the same number, but seen to be a multiple
        return tl.load(row_ptr + token_ids, mask=is_inside, other=float("-inf")).to(tl.float32)
    else:
        at = row_ptr + token_ids.to(tl.int64) * stride_v
        return tl.load(at, mask=token_ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def load_temperature(temperature, temperatures_ptr, sequence):
    """A sequence's temperature, float32; None where it is 1 for all."""
    if temperatures_ptr is not None:
        return tl.load(temperatures_ptr + sequence).to(tl.float32)
    elif temperature is not None:  # Triton 3.6 cannot return None by name
        return temperature


@triton.jit
def warp(x, temperature, cutoffs):
    """Logits [N] of the law, from raw ones; cutoffs a scalar or [N]. At temperature 0 nothing changes."""
    if temperature is not None:
        x = tl.div_rn(x, tl.where(temperature == 0.0, 1.0, temperature) + tl.zeros_like(x))
    if cutoffs is not None:
        if temperature is not None:
            cutoffs = tl.where(temperature == 0.0, float("-inf"), cutoffs)
        x = tl.where(x < cutoffs, float("-inf"), x)
    return x


@triton.jit
def load_cutoff(cutoffs_ptr, row):
    """A row's cutoff, float32; None where there are none."""
    if cutoffs_ptr is not None:
        return tl.load(cutoffs_ptr + row)


@triton.jit
def load_cutoffs(cutoffs_ptr, rows, mask):
    """The cutoffs [P] of rows [P], float32; None where there are none."""
    if cutoffs_ptr is not None:
        return tl.load(cutoffs_ptr + rows, mask=mask, other=float("-inf"))


@triton.jit
def is_finite(x):
    """False for NaN and both infinities."""
    return tl.abs(x) < float("inf")


@triton.jit
def chunk_max(x):
    """Maximum of [CHUNK]; NaN where any entry is."""
    has_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    return tl.where(has_nan, float("nan"), tl.max(tl.where(x != x, float("-inf"), x), axis=0))


@triton.jit
def first_id(is_there, token_ids, vocab_size):
    """The lowest id where `is_there`; some id in range where it is nowhere."""
    return tl.minimum(tl.min(tl.where(is_there, token_ids, NO_ID), axis=0), vocab_size - 1)


@triton.jit
def chunk_masses(x, top):
    """exp(x - top) of [CHUNK], where a row without a finite maximum is left as it is."""
    return tl.exp(x - tl.where(is_finite(top), top, 0.0))


@triton.jit
def chunk_race(weights, clocks, token_ids, vocab_size):
    """Winner of a chunk's exponential race: its key and its id; weights and clocks [CHUNK]."""
    keys = tl.where(token_ids < vocab_size, weights / clocks, -1.0)
    best = tl.max(keys, axis=0)
    return best, first_id(keys == best, token_ids, vocab_size)


@triton.jit
def merge_maxes(floats_ptr, ints_ptr, rows, mask, num_chunks):
    """Maximum [P] and its lowest id [P] of the rows `rows` [P] int64; NaN where any chunk has one."""
    top = tl.where(mask, float("-inf"), 0.0)
    has_nan = rows < 0
    best_id = tl.zeros_like(top).to(tl.int32)
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        inside = mask[:, None] & (chunks < num_chunks)[None, :]
        at = rows[:, None] * num_chunks + chunks[None, :]
        tops = tl.load(floats_ptr + at, mask=inside, other=float("-inf"))  # [P, C]
        has_nan = has_nan | (tl.max((tops != tops).to(tl.int32), axis=1) > 0)
        tops = tl.where(tops != tops, float("-inf"), tops)
        here = tl.max(tops, axis=1)
        chunk = tl.min(tl.where(tops == here[:, None], chunks[None, :], NO_ID), axis=1)
        chunk_id = tl.load(ints_ptr + rows * num_chunks + chunk, mask=mask & (chunk < num_chunks), other=0)
        best_id = tl.where((here > top) | (first == 0), chunk_id, best_id)
        top = tl.maximum(top, here)
    return tl.where(has_nan, float("nan"), top), best_id


@triton.jit
def merge_sums(floats_ptr, sums_ptr, rows, mask, num_chunks, top):
    """Sum [P] of the chunks' sums, each scaled from its own maximum to `top` [P]."""
    base = tl.where(is_finite(top), top, 0.0)
    total = tl.zeros_like(top)
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        inside = mask[:, None] & (chunks < num_chunks)[None, :]
        at = rows[:, None] * num_chunks + chunks[None, :]
        tops = tl.load(floats_ptr + at, mask=inside, other=float("-inf"))  # [P, C]
        sums = tl.load(sums_ptr + at, mask=inside, other=0.0)
        total += tl.sum(sums * tl.exp(tops - base[:, None]), axis=1)
    return total


@triton.jit
def merge_plain_sums(sums_ptr, rows, mask, num_chunks):
    """Sum [P] of what the chunks of the rows hold."""
    total = tl.where(mask, 0.0, 0.0)
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        inside = mask[:, None] & (chunks < num_chunks)[None, :]
        at = rows[:, None] * num_chunks + chunks[None, :]
        total += tl.sum(tl.load(sums_ptr + at, mask=inside, other=0.0), axis=1)
    return total


@triton.jit
def merge_spreads(floats_ptr, sums_ptr, spreads_ptr, rows, mask, num_chunks, top):
    """Sum [P] of (x - top) exp(x - top), from the chunks' sums and their spreads about their own maxima."""
    base = tl.where(is_finite(top), top, 0.0)
    total = tl.zeros_like(top)
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        inside = mask[:, None] & (chunks < num_chunks)[None, :]
        at = rows[:, None] * num_chunks + chunks[None, :]
        tops = tl.load(floats_ptr + at, mask=inside, other=float("-inf"))  # [P, C]
        sums = tl.load(sums_ptr + at, mask=inside, other=0.0)
        spreads = tl.load(spreads_ptr + at, mask=inside, other=0.0)
        shifts = tl.maximum(tops - base[:, None], -200.0)  # exp(-200) is 0, and 0 * -200 is 0 where 0 * -inf is not
        total += tl.sum((spreads + shifts * sums) * tl.exp(shifts), axis=1)
    return total


@triton.jit
def merge_races(floats_ptr, keys_ptr, winners_ptr, rows, mask, num_chunks, top):
    """Winner's id [P] of the rows' races, whose keys are scaled from each chunk's own maximum to `top` [P]."""
    base = tl.where(is_finite(top), top, 0.0)
    best = tl.where(mask, -1.0, 0.0)
    best_id = tl.zeros_like(top).to(tl.int32)
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        inside = mask[:, None] & (chunks < num_chunks)[None, :]
        at = rows[:, None] * num_chunks + chunks[None, :]
        tops = tl.load(floats_ptr + at, mask=inside, other=float("-inf"))  # [P, C]
        keys = tl.load(keys_ptr + at, mask=inside, other=-1.0) * tl.exp(tops - base[:, None])
        here = tl.max(keys, axis=1)
        chunk = tl.min(tl.where(keys == here[:, None], chunks[None, :], NO_ID), axis=1)
        chunk_id = tl.load(winners_ptr + rows * num_chunks + chunk, mask=mask & (chunk < num_chunks), other=0)
        best_id = tl.where(here > best, chunk_id, best_id)
        best = tl.maximum(best, here)
    return best_id


@triton.jit
def logsumexps(top, total):
    """Log-sum-exp of rows: NaN, +inf or -inf where a NaN, a +inf or nothing but -inf leaves no law."""
    return tl.where(is_finite(top), top + tl.log(total), top)


@triton.jit
def law_status(top):
    """`Status` flags of a row by its maximum or log-sum-exp; 0 for a row with a law."""
    is_masked = top == float("-inf")
    return tl.where(top != top, 2, tl.where(is_masked, 4, tl.where(top == float("inf"), 8, 0)))
