"""The random numbers of `kernels.noise` in Triton, bitwise equal."""

import triton
import triton.language as tl

from ..noise import (
    POSITION_FACTOR,
    ROUND_FACTOR,
    STATE_FACTORS,
    UNIFORM_SCALE,
    WORD_FACTORS,
    WORD_SHIFTS,
    stream_offset,
)
from ..types import Stream

ACCEPT = tl.constexpr(stream_offset(Stream.ACCEPT))
CORRECTION = tl.constexpr(stream_offset(Stream.CORRECTION))
RACE = tl.constexpr(stream_offset(Stream.RACE))
_ROUND_FACTOR = tl.constexpr(ROUND_FACTOR)
_POSITION_FACTOR = tl.constexpr(POSITION_FACTOR)
_STATE_FACTOR_0 = tl.constexpr(STATE_FACTORS[0])
_STATE_FACTOR_1 = tl.constexpr(STATE_FACTORS[1])
_WORD_FACTOR_0 = tl.constexpr(WORD_FACTORS[0])
_WORD_FACTOR_1 = tl.constexpr(WORD_FACTORS[1])
_WORD_FACTOR_2 = tl.constexpr(WORD_FACTORS[2])
_WORD_SHIFT_0 = tl.constexpr(WORD_SHIFTS[0])
_WORD_SHIFT_1 = tl.constexpr(WORD_SHIFTS[1])
_WORD_SHIFT_2 = tl.constexpr(WORD_SHIFTS[2])
_WORD_MASK_0 = tl.constexpr((1 << (32 - WORD_SHIFTS[0])) - 1)
_WORD_MASK_1 = tl.constexpr((1 << (32 - WORD_SHIFTS[1])) - 1)
_UNIFORM_SCALE = tl.constexpr(UNIFORM_SCALE)
_BOUND_SCALE = tl.constexpr(UNIFORM_SCALE * (1.0 - 2.0**-16))
# Below this value, -log1p(-u) is computed with a series, whose first omitted term is 5e-9 of the
# result. Above this value, 1 - u has enough digits.
_SERIES_BELOW = tl.constexpr(0.03125)


@triton.jit
def fold64(z):
    """XOR the high half of int64 into the low half."""
    return z ^ (z >> 32)


@triton.jit
def noise_states(seeds, rounds, positions, STREAM: tl.constexpr):
    """Hash seeds, rounds and positions into int64 states, see `..noise.states`.

    STREAM is a stream offset.
    """
    z = seeds + STREAM + positions * _POSITION_FACTOR
    if STREAM != RACE:
        z += rounds * _ROUND_FACTOR
    return fold64(fold64(fold64(z) * _STATE_FACTOR_0) * _STATE_FACTOR_1)


@triton.jit
def words(states, token_ids):
    """Compute 32 random bits, rounded to float32, from int64 states and int32 ids.

    See `..noise.words`.
    """
    x = (token_ids + states.to(tl.int32)) * _WORD_FACTOR_0
    x = x ^ ((x >> _WORD_SHIFT_0) & _WORD_MASK_0)
    x = x * _WORD_FACTOR_1 + (states >> 32).to(tl.int32)
    x = x ^ ((x >> _WORD_SHIFT_1) & _WORD_MASK_1)
    x = x * _WORD_FACTOR_2
    x = x + (x >> _WORD_SHIFT_2)
    return x.to(tl.uint32, bitcast=True).to(tl.float32)


@triton.jit
def uniforms(states, token_ids):
    """Return uniform random numbers in (0, 1), float32, from int64 states and int32 ids.

    See `..noise.uniforms`.
    """
    return (words(states, token_ids) + 0.5) * _UNIFORM_SCALE


@triton.jit
def key_bounds(weights, states, token_ids):
    """Return numbers farther from 0 than weights / `exponentials`, with the same signs.

    The bound holds since u < -log(1 - u), and u is rounded down.
    """
    u = words(states, token_ids) * _BOUND_SCALE + 0.5 * _BOUND_SCALE
    root = tl.rsqrt(u)  # its square is the reciprocal, in two instructions
    return weights * root * root


@triton.jit
def exponentials(states, token_ids):
    """Return exponential random numbers of rate 1, float32, > 0; see `..noise.exponentials`."""
    u = uniforms(states, token_ids)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    return tl.where(u < _SERIES_BELOW, series, -tl.log(1.0 - u))
