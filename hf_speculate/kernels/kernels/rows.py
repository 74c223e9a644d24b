"""Row helpers for the kernels: load a chunk of logits, compute its statistics, merge chunks.

A row is read in chunks of CHUNK entries. The statistics of a chunk are the same in every program,
and chunks are merged in order, so no result depends on the grid.
"""

import triton
import triton.language as tl

# Number of chunks merged in one step; one step is enough for V up to 262,144.
CHUNKS_AT_ONCE = tl.constexpr(64)
NO_ID = tl.constexpr(2**31 - 1)
# Memory layouts of a row; each kernel is compiled for one layout.
STRIDED = tl.constexpr(0)
ALIGNED = tl.constexpr(1)  # contiguous; V and the offsets of all rows are multiples of 16 entries
SHIFTED = tl.constexpr(2)  # contiguous
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """Compute 2**(x * log2(e)), or 0 below 2**-126; `tl.exp` takes three more instructions."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def row_offset(sequence, position, stride_b, stride_i, ROWS: tl.constexpr):
    """Return the offset of a row in entries, int64."""
    offset = sequence.to(tl.int64) * stride_b + position.to(tl.int64) * stride_i
    if ROWS == ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset


@triton.jit
def load_chunk(row_ptr, stride_v, first_id, token_ids, vocab_size, ROWS: tl.constexpr):
    """Load the logits of `token_ids` [CHUNK] in float32, with -inf past the vocabulary.

    If SHIFTED, the ids start at `first_id`.
    """
    if ROWS == ALIGNED:
        # This equals vocab_size, and tells the compiler that it is divisible by 16.
        is_inside = token_ids < (vocab_size // 16) * 16
        return tl.load(row_ptr + token_ids, mask=is_inside, other=float("-inf")).to(tl.float32)
    elif ROWS == SHIFTED:
        return load_shifted(row_ptr, first_id, vocab_size, token_ids.shape[0])
    else:
        at = row_ptr + token_ids.to(tl.int64) * stride_v
        return tl.load(at, mask=token_ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def load_shifted(row_ptr, first_id, vocab_size, CHUNK: tl.constexpr):
    """Load the logits of CHUNK token ids from `first_id` on, in vectors of 16 bytes.

    They are float32, with -inf past the vocabulary. The row starts `shift` bytes after an aligned
    address. A vector of the row therefore consists of the end of one aligned vector, `low`, and the
    beginning of the next, `high`. These may hold entries from before the row. Past its last whole
    vector, the row is read entry by entry, because its storage may end there.
    """
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    BYTES: tl.constexpr = dtype.primitive_bitwidth // 8
    BITS: tl.constexpr = tl.uint16 if BYTES == 2 else tl.uint32
    shift = (row_ptr.to(tl.int64) & 15).to(tl.int32)
    start_ptr = tl.multiple_of(row_ptr - shift // BYTES, 16)
    end = vocab_size + shift // BYTES
    # Number of vectors in this chunk and later chunks.
    num_whole = end * BYTES // 16 - first_id * BYTES // 16
    vectors = tl.arange(0, CHUNK * BYTES // 16)[:, None]
    words = tl.arange(0, 2)[None, :]
    at = (
        start_ptr.to(tl.pointer_type(tl.uint64), bitcast=True)
        + first_id * BYTES // 8
        + (vectors * 2 + words)
    )
    if num_whole > CHUNK * BYTES // 16:
        low = tl.load(at)  # [CHUNK * BYTES / 16, 2]
        high = tl.load(at + 2)
    else:
        lanes = tl.arange(0, 8 // BYTES)[None, :]
        tail = end * BYTES // 16 * 16 // BYTES + tl.arange(0, 2)[:, None] * (8 // BYTES) + lanes
        tail = tl.load(start_ptr + tail, mask=tail < end, other=float("-inf")).to(
            BITS, bitcast=True
        )
        tail = tl.sum(tail.to(tl.uint64) << (lanes * 8 * BYTES), axis=1)[None, :]  # [1, 2]
        fill = tl.full([], float("-inf"), dtype).to(BITS, bitcast=True).to(tl.uint64)
        fill = fill * (0x0001000100010001 if BYTES == 2 else 0x0000000100000001)
        low = tl.load(
            at, mask=vectors < num_whole, other=tl.where(vectors == num_whole, tail, fill)
        )
        high = tl.load(
            at + 2,
            mask=vectors + 1 < num_whole,
            other=tl.where(vectors + 1 == num_whole, tail, fill),
        )
    a, b = tl.split(low)
    c, d = tl.split(high)
    is_far = (shift & 8) != 0
    a, b, c = tl.where(is_far, b, a), tl.where(is_far, c, b), tl.where(is_far, d, c)
    a, b, c = skip_bytes(a, b, shift, 4), skip_bytes(b, c, shift, 4), skip_bytes(c, c, shift, 4)
    if BYTES == 2:
        a, b = skip_bytes(a, b, shift, 2), skip_bytes(b, c, shift, 2)
    x = tl.join(a, b)
    x = tl.join(x.to(tl.uint32), (x >> 32).to(tl.uint32))
    if BYTES == 2:
        x = tl.join(x.to(tl.uint16), (x >> 16).to(tl.uint16))
    return tl.reshape(x.to(dtype, bitcast=True).to(tl.float32), [CHUNK])


@triton.jit
def skip_bytes(low, high, shift, NUM_BYTES: tl.constexpr):
    """Drop NUM_BYTES bytes of `low` if `shift` has this bit, and fill up from `high`; uint64."""
    skipped = (low >> (8 * NUM_BYTES)) | (high << (64 - 8 * NUM_BYTES))
    return tl.where((shift & NUM_BYTES) != 0, skipped, low)


@triton.jit
def load_temperature(temperature, temperatures_ptr, sequence):
    """Load the temperature of a sequence, float32; None if it is 1 for all sequences."""
    if temperatures_ptr is not None:
        return tl.load(temperatures_ptr + sequence).to(tl.float32)
    elif temperature is not None:  # Triton 3.6 cannot return None by name
        return temperature


@triton.jit
def warp(x, temperature, cutoffs):
    """Apply temperature and cutoffs (a scalar or [N]) to logits [N].

    Temperature 0 leaves the logits unchanged.
    """
    if temperature is not None:
        x = tl.div_rn(x, tl.where(temperature == 0.0, 1.0, temperature) + tl.zeros_like(x))
    if cutoffs is not None:
        if temperature is not None:
            cutoffs = tl.where(temperature == 0.0, float("-inf"), cutoffs)
        x = tl.where(x < cutoffs, float("-inf"), x)
    return x


@triton.jit
def load_cutoff(cutoffs_ptr, row):
    """Load the cutoff of a row, float32; None without cutoffs."""
    if cutoffs_ptr is not None:
        return tl.load(cutoffs_ptr + row)


@triton.jit
def load_cutoffs(cutoffs_ptr, rows, mask):
    """Load cutoffs [P] of rows [P], float32; None without cutoffs."""
    if cutoffs_ptr is not None:
        return tl.load(cutoffs_ptr + rows, mask=mask, other=float("-inf"))


@triton.jit
def is_finite(x):
    """Return whether each entry is neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def chunk_max(x):
    """Return the maximum of [CHUNK]; NaN if any entry is NaN."""
    has_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    return tl.where(has_nan, float("nan"), tl.max(tl.where(x != x, float("-inf"), x), axis=0))


@triton.jit
def first_id(is_there, token_ids, vocab_size):
    """Return the lowest token id where `is_there` is true; some id in range if there is none."""
    return tl.minimum(tl.min(tl.where(is_there, token_ids, NO_ID), axis=0), vocab_size - 1)


@triton.jit
def chunk_masses(x, top):
    """Compute exp(x - top) for [CHUNK], or exp(x) if the maximum `top` is not finite."""
    return exp(x - tl.where(is_finite(top), top, 0.0))


@triton.jit
def pack_race(keys, token_ids):
    """Pack race keys and token ids into int64, ordered by larger keys, then by lower ids.

    The bits of non-negative floats are ordered like integers. Negated keys are below all others,
    and are ordered by their absolute values.
    """
    return (keys.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (token_ids ^ NO_ID).to(tl.int64)


@triton.jit
def unpack_race(packed, vocab_size):
    """Return the bits of the key, and the token id clamped to the vocabulary."""
    return (packed >> 32).to(tl.int32), tl.minimum(
        (packed.to(tl.int32) & NO_ID) ^ NO_ID, vocab_size - 1
    )


@triton.jit
def chunk_race(weights, noise, token_ids, vocab_size):
    """Run the exponential race of a chunk.

    Weights and noise are [CHUNK]. Return the largest key, weight / noise, and its token id.
    """
    bits, winner = unpack_race(tl.max(pack_race(weights / noise, token_ids), axis=0), vocab_size)
    return bits.to(tl.float32, bitcast=True), winner


@triton.jit
def merge_rows(
    floats_ptr, ints_ptr, plane, first_row, lanes, mask, num_chunks, SUMS: tl.constexpr, CACHE:
    tl.constexpr = "",
):  # fmt: skip
    """Merge the chunks of rows `first_row` + lanes.

    Return the maximum, its lowest token id and, with SUMS, the sum of exp(x - maximum), each [P].
    The chunk sums are relative to the chunk maxima. If a chunk contains a NaN, the sum is NaN, or
    the maximum without SUMS. CACHE ".cg" is needed to read results of other programs in the same
    launch.
    """
    start = first_row.to(tl.int64) * num_chunks
    top = tl.where(mask, float("-inf"), 0.0)
    has_nan = lanes < 0
    best_id = tl.zeros_like(lanes)
    total = tl.zeros_like(top)
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        inside = mask[:, None] & (chunks < num_chunks)[None, :]
        at = lanes[:, None] * num_chunks + chunks[None, :]
        # [P, C]
        tops = tl.load(
            floats_ptr + start + at, mask=inside, other=float("-inf"), cache_modifier=CACHE
        )
        if SUMS:
            sums = tl.load(
                floats_ptr + plane + start + at, mask=inside, other=0.0, cache_modifier=CACHE
            )
        else:
            has_nan = has_nan | (tl.max((tops != tops).to(tl.int32), axis=1) > 0)
            tops = tl.where(tops != tops, float("-inf"), tops)
        here = tl.max(tops, axis=1)
        chunk = tl.min(tl.where(tops == here[:, None], chunks[None, :], NO_ID), axis=1)
        at = lanes * num_chunks + chunk
        is_there = mask & (chunk < num_chunks)
        chunk_id = tl.load(ints_ptr + start + at, mask=is_there, other=0, cache_modifier=CACHE)
        best_id = tl.where((here > top) | (first == 0), chunk_id, best_id)
        if SUMS:
            base = tl.maximum(top, here)
            base = tl.where(is_finite(base), base, 0.0)
            total = total * exp(top - base) + tl.sum(sums * exp(tops - base[:, None]), axis=1)
        top = tl.maximum(top, here)
    return tl.where(has_nan, float("nan"), top), best_id, total


@triton.jit
def merge_plain_sums(sums_ptr, first_row, lanes, mask, num_chunks):
    """Add up the chunk sums of rows `first_row` + `lanes` [P], to [P]."""
    start = first_row.to(tl.int64) * num_chunks
    total = tl.where(mask, 0.0, 0.0)
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        inside = mask[:, None] & (chunks < num_chunks)[None, :]
        at = lanes[:, None] * num_chunks + chunks[None, :]
        total += tl.sum(tl.load(sums_ptr + start + at, mask=inside, other=0.0), axis=1)
    return total


@triton.jit
def merge_spreads(floats_ptr, plane, first_row, lanes, mask, num_chunks, top):
    """Sum (x - top) exp(x - top) over each row, to [P].

    The chunk sums and spreads are relative to the chunk maxima.
    """
    start = first_row.to(tl.int64) * num_chunks
    base = tl.where(is_finite(top), top, 0.0)
    total = tl.zeros_like(top)
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        inside = mask[:, None] & (chunks < num_chunks)[None, :]
        at = lanes[:, None] * num_chunks + chunks[None, :]
        tops = tl.load(floats_ptr + start + at, mask=inside, other=float("-inf"))  # [P, C]
        sums = tl.load(floats_ptr + plane + start + at, mask=inside, other=0.0)
        spreads = tl.load(floats_ptr + 2 * plane + start + at, mask=inside, other=0.0)
        # exp(-200) is 0 in float32; 0 * -inf would be NaN.
        shifts = tl.maximum(tops - base[:, None], -200.0)
        total += tl.sum((spreads + shifts * sums) * exp(shifts), axis=1)
    return total


@triton.jit
def merge_races(
    floats_ptr, ints_ptr, plane, first_row, lanes, mask, num_chunks, top, CACHE: tl.constexpr = "",
):  # fmt: skip
    """Return the token id [P] with the largest key of each row.

    The keys of each chunk are rescaled from the chunk's maximum to `top` [P].
    """
    start = first_row.to(tl.int64) * num_chunks
    base = tl.where(is_finite(top), top, 0.0)
    best = tl.where(mask, -1.0, 0.0)
    best_id = tl.zeros_like(lanes)
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        inside = mask[:, None] & (chunks < num_chunks)[None, :]
        at = lanes[:, None] * num_chunks + chunks[None, :]
        # [P, C]
        tops = tl.load(
            floats_ptr + start + at, mask=inside, other=float("-inf"), cache_modifier=CACHE
        )
        keys = tl.load(
            floats_ptr + 2 * plane + start + at, mask=inside, other=-1.0, cache_modifier=CACHE
        )
        keys = keys * exp(tops - base[:, None])
        here = tl.max(keys, axis=1)
        chunk = tl.min(tl.where(keys == here[:, None], chunks[None, :], NO_ID), axis=1)
        at = lanes * num_chunks + chunk
        is_there = mask & (chunk < num_chunks)
        chunk_id = tl.load(
            ints_ptr + plane + start + at, mask=is_there, other=0, cache_modifier=CACHE
        )
        best_id = tl.where(here > best, chunk_id, best_id)
        best = tl.maximum(best, here)
    return best_id


@triton.jit
def logsumexps(top, total):
    """Return log-sum-exps; NaN, +inf or -inf for a row with a NaN, with +inf, or of only -inf."""
    return tl.where(is_finite(top) | (total != total), top + tl.log(total), top)


@triton.jit
def row_status(top):
    """Return `Status` flags of a row from its maximum or log-sum-exp; 0 for a valid row."""
    is_masked = top == float("-inf")
    return tl.where(top != top, 2, tl.where(is_masked, 4, tl.where(top == float("inf"), 8, 0)))
