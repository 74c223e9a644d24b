"""Counter-based random numbers, hashed from (row seed, round, position, stream, token id).

There is no generator state. A 64-bit state is hashed once per row and position, then mixed with
each token id:

    state = fold64(fold64(fold64(seed + round * A + position * B + stream * C + D) * M1) * M2)
    word  = sum16(fold15(fold16((token + low(state)) * N1) * N2 + high(state)) * N3)

    fold64(z) = z ^ (z >> 32)      foldS(x) = x ^ (x >>> S)      sum16(x) = x + (x >> 16)

Arithmetic is signed and wraps around; `>>` keeps the sign, and `>>>` fills with zeros. Hence torch
and Triton give the same bits. Variants with two multiplications, or with folds that add instead of
xor, failed the tests on consecutive token ids (chi-square of single rows, pairs of neighbours).
"""

from typing import Any

import torch
from torch import Tensor

from .types import NoiseKeys, Stream


def _signed(value: int, bits: int) -> int:
    """Return the lowest `bits` bits of `value` as a signed integer."""
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


# Odd constants: fractional parts of irrational numbers, and the multipliers of the murmur and
# lowbias hash functions.
ROUND_FACTOR = _signed(0x9E3779B97F4A7C15, 64)
POSITION_FACTOR = _signed(0xD1B54A32D192ED03, 64)
STREAM_FACTOR = 0x2545F4914F6CDD1D
STATE_OFFSET = 0x6A09E667F3BCC909
STATE_FACTORS = (_signed(0xFF51AFD7ED558CCD, 64), _signed(0xC4CEB9FE1A85EC53, 64))
WORD_FACTORS = (_signed(0x9E3779B9, 32), 0x7FEB352D, _signed(0x846CA68B, 32))
WORD_SHIFTS = (16, 15, 16)
WORD_MASKS = tuple((1 << (32 - shift)) - 1 for shift in WORD_SHIFTS)
ROW_FACTOR = 0x5851F42D4C957F2D

# (word + 0.5) * UNIFORM_SCALE lies in (0, 1) for every word, since 2**32 times the scale is 1 -
# 2**-24 in float32.
UNIFORM_SCALE = (2.0**24 - 1.0) * 2.0**-56

# Tensors save time, since torch converts a Python int in every operation. On small rows, this costs
# more than the arithmetic.
_FACTORS = tuple(torch.tensor(factor, dtype=torch.int32, device="cpu") for factor in WORD_FACTORS)
_SHIFTS = tuple(torch.tensor(shift, dtype=torch.int32, device="cpu") for shift in WORD_SHIFTS)
_MASKS = tuple(torch.tensor(mask, dtype=torch.int32, device="cpu") for mask in WORD_MASKS)


def _fold64(z: Tensor) -> Tensor:
    return z ^ (z >> 32)


def _mix64(z: Tensor) -> Tensor:
    """Hash int64 `z` of any shape, so that every output bit depends on every input bit."""
    first, second = STATE_FACTORS
    return _fold64(_fold64(_fold64(z) * first) * second)


def row_seeds(seed: int | Tensor, num_rows: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Derive the row seeds of a call; row 0 gets the seed itself, and row r gets mix(seed, r).

    Args:
        seed: any integer, taken modulo 2**64; or [1] int64, used on its device.
        num_rows: number of output rows, >= 0.
        device: device of the result if `seed` is an integer.

    Returns:
        [num_rows] int64.
    """
    base = (
        seed
        if isinstance(seed, Tensor)
        else torch.full((1,), _signed(seed, 64), dtype=torch.int64, device=device)
    )
    rows = torch.arange(num_rows, dtype=torch.int64, device=base.device)
    return torch.where(rows == 0, base, _mix64(torch.add(base, rows, alpha=ROW_FACTOR)))


def stream_offset(stream: Stream) -> int:
    """Return the signed 64-bit integer added to the row seed for a stream."""
    return _signed(STATE_OFFSET + int(stream) * STREAM_FACTOR, 64)


def states(keys: NoiseKeys, stream: Stream, position_offsets: Tensor) -> Tensor:
    """Hash row seed, round, position and stream into states, shared by all token ids.

    Args:
        keys: [B] int64 each.
        stream: random number stream; RACE ignores the round.
        position_offsets: integers [B, ...] or [1, ...], added to `keys.positions`.

    Returns:
        int64, [B, ...] like `position_offsets`.
    """
    shape = (-1,) + (1,) * (position_offsets.dim() - 1)
    row = keys.seeds + stream_offset(stream)
    if stream != Stream.RACE:
        row = torch.add(row, keys.rounds, alpha=ROUND_FACTOR)
    positions = keys.positions.view(shape) + position_offsets
    return _mix64(torch.add(row.view(shape), positions, alpha=POSITION_FACTOR))


def words(state: Tensor, token_ids: Tensor) -> Tensor:
    """Compute 32 random bits per entry, as int32.

    Args:
        state: int64 states.
        token_ids: int32 or int64, broadcastable with the states.
    """
    return _words_and_scratch(state, token_ids)[0]


def _words_and_scratch(state: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the words and a scratch buffer for reuse.

    Allocating memory costs more than the arithmetic.
    """
    # Compiled code uses Python numbers, because CPU tensors would prevent CUDA graph capture.
    is_compiling = torch.compiler.is_compiling()
    factors: Any = WORD_FACTORS if is_compiling else _FACTORS
    shifts: Any = WORD_SHIFTS if is_compiling else _SHIFTS
    masks: Any = WORD_MASKS if is_compiling else _MASKS
    x = token_ids.to(torch.int32) + state.to(torch.int32)
    x.mul_(factors[0])
    shifted = torch.bitwise_right_shift(x, shifts[0])
    x.bitwise_xor_(shifted.bitwise_and_(masks[0]))
    torch.add((state >> 32).to(torch.int32), x, alpha=WORD_FACTORS[1], out=x)
    torch.bitwise_right_shift(x, shifts[1], out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_(masks[1]))
    x.mul_(factors[2])
    torch.bitwise_right_shift(x, shifts[2], out=shifted)
    return x.add_(shifted), shifted


def _scaled_words(state: Tensor, token_ids: Tensor, scale: float) -> Tensor:
    """Return `scale` * (word + 0.5), float32, with the word as an unsigned integer."""
    bits, scratch = _words_and_scratch(state, token_ids)
    return scratch.view(torch.float32).copy_(bits.view(torch.uint32)).add_(0.5).mul_(scale)


def uniforms(
    keys: NoiseKeys, stream: Stream, position_offsets: Tensor, token_ids: Tensor
) -> Tensor:
    """Return uniform random numbers in (0, 1), in steps of 2**-32 near 0; 0 and 1 never occur.

    Args:
        keys: [B] int64 each.
        stream: random number stream.
        position_offsets: integers [B, ...] or [1, ...], added to `keys.positions`.
        token_ids: int32 or int64, broadcastable with [B, ...]: `[V]` against offsets [B, 1] gives
            [B, V].

    Returns:
        float32, of the broadcast shape.
    """
    return _scaled_words(states(keys, stream, position_offsets), token_ids, UNIFORM_SCALE)


def exponentials(
    keys: NoiseKeys, stream: Stream, position_offsets: Tensor, token_ids: Tensor
) -> Tensor:
    """Return exponential random numbers of rate 1, > 0, with the finest resolution near 0.

    See `uniforms` for the arguments.
    """
    return exponentials_of(states(keys, stream, position_offsets), token_ids)


def exponentials_of(state: Tensor, token_ids: Tensor) -> Tensor:
    """Return random numbers like `exponentials`, from int64 `states`."""
    return _scaled_words(state, token_ids, -UNIFORM_SCALE).log1p_().neg_()
