"""Test that noise is uniform, independent along every key, and equal to plain integers."""

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from hf_speculate.kernels import NoiseKeys, Stream, exponentials, noise, row_seeds, uniforms
from tests.kernels.distributions import PASS_P_VALUE

NUM_ROWS, NUM_TOKENS = 512, 4096
NUM_CELLS = 256
NO_OFFSET = torch.zeros(1, 1, dtype=torch.int64)

AXES: dict[str, Callable[[Tensor, Tensor], NoiseKeys]] = {
    "consecutive seeds": lambda count, zero: NoiseKeys(count, zero, zero),
    "row seeds": lambda count, zero: NoiseKeys(row_seeds(0, len(count)), zero, zero),
    "seeds that differ in high bits": lambda count, zero: NoiseKeys(count << 54, zero, zero),
    "rounds": lambda count, zero: NoiseKeys(zero, count, zero),
    "positions": lambda count, zero: NoiseKeys(zero, zero, count),
}


def noise_along(axis: str, stream: Stream = Stream.DRAFT) -> Tensor:
    """Return uniforms [NUM_ROWS, NUM_TOKENS] for rows that differ in one key."""
    count = torch.arange(NUM_ROWS)
    keys = AXES[axis](count, torch.zeros_like(count))
    return uniforms(keys, stream, NO_OFFSET, torch.arange(NUM_TOKENS))


def cells_p_value(cells: Tensor, num_cells: int) -> float:
    """Return the chi-square p-value of the integers `cells` under a uniform distribution."""
    counts = torch.bincount(cells.flatten().long(), minlength=num_cells).double()
    expected = cells.numel() / num_cells
    return float(chi2.sf(float(((counts - expected) ** 2 / expected).sum()), num_cells - 1))


@pytest.mark.parametrize("axis", AXES)
def test_uniforms_and_neighbour_pairs_are_uniform(axis: str) -> None:
    values = noise_along(axis)
    assert cells_p_value(values * NUM_CELLS, NUM_CELLS) > PASS_P_VALUE
    assert cells_p_value(values.double() * 2**20 % NUM_CELLS, NUM_CELLS) > PASS_P_VALUE
    coarse = (values * 16).long()  # pairs of neighbours
    assert cells_p_value(coarse[:, :-1] * 16 + coarse[:, 1:], 256) > PASS_P_VALUE
    assert cells_p_value(coarse[:-1] * 16 + coarse[1:], 256) > PASS_P_VALUE


def test_streams_are_independent() -> None:
    values = [noise_along("row seeds", stream) for stream in Stream]
    for first in range(len(values)):
        for second in range(first):
            square = (values[first] * 16).long() * 16 + (values[second] * 16).long()
            assert cells_p_value(square, 256) > PASS_P_VALUE


def test_row_zero_keeps_the_seed_and_other_rows_scatter() -> None:
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        seeds = row_seeds(seed, 1000)
        assert seeds.dtype == torch.int64
        assert seeds[0] == seed
        assert len(seeds.unique()) == 1000
        assert torch.equal(row_seeds(torch.tensor([seed]), 1000), seeds)
    assert row_seeds(2**64 - 1, 1)[0] == -1
    assert row_seeds(5, 0).shape == row_seeds(torch.tensor([5]), 0).shape == (0,)
    assert row_seeds(5, 3, device="meta").device.type == "meta"


def fold64(state: int) -> int:
    return state ^ (state >> 32)


def signed(value: int, bits: int) -> int:
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def plain_word(seed: int, rounds: int, position: int, stream: Stream, token_id: int) -> int:
    """Compute the two formulas of the module docstring with Python integers.

    If a constant changed, the text of every seed would change.
    """
    state = (
        seed + position * 0xD1B54A32D192ED03 + int(stream) * 0x2545F4914F6CDD1D + 0x6A09E667F3BCC909
    )
    state += 0 if stream is Stream.RACE else rounds * 0x9E3779B97F4A7C15
    state = fold64(signed(state, 64))
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        state = fold64(signed(state * factor, 64))
    word = ((token_id + state) * 0x9E3779B9) % 2**32
    word = ((word ^ (word >> 16)) * 0x7FEB352D + (state >> 32)) % 2**32
    word = signed((word ^ (word >> 15)) * 0x846CA68B, 32)
    return signed(word + (word >> 16), 32)


def test_words_equal_those_of_plain_integers() -> None:
    for seed, rounds, position in [
        (0, 0, 0),
        (1, 2, 3),
        (-5, 2**40, 131071),
        (2**63 - 1, 7, 2**31),
    ]:
        keys = NoiseKeys(*(torch.tensor([key]) for key in (seed, rounds, position)))
        for stream in Stream:
            for offset in (0, 3):
                state = noise.states(keys, stream, torch.tensor([offset]))
                for token_id in (0, 1, 31999, 262143):
                    word = noise.words(state, torch.tensor([token_id]))
                    assert int(word) == plain_word(
                        seed, rounds, position + offset, stream, token_id
                    )


def token_of(word: int, state: int) -> int:
    """Invert the last formula of `plain_word`: return the token id that gives a word."""
    last = word - (word >> 16)
    (word,) = (
        value for value in range(last - 1, last + 2) if signed(value + (value >> 16), 32) == word
    )
    word = (word * pow(0x846CA68B, -1, 2**32)) % 2**32
    word = (word ^ (word >> 15) ^ (word >> 30)) - (state >> 32)
    word = (word * pow(0x7FEB352D, -1, 2**32)) % 2**32
    word = (word ^ (word >> 16)) * pow(0x9E3779B9, -1, 2**32)
    return signed(word - state, 32)


def test_extreme_words_give_neither_zero_nor_one() -> None:
    """Use -2 as the largest unsigned word, because no token has the word -1."""
    extremes, offset = [0, 1, 2**31 - 1, -(2**31), -2], torch.zeros(1, dtype=torch.int64)
    keys = NoiseKeys(*(torch.zeros(1, dtype=torch.int64) for _ in range(3)))
    state = noise.states(keys, Stream.ACCEPT, offset)
    ids = torch.tensor([token_of(word, int(state)) for word in extremes], dtype=torch.int32)
    assert noise.words(state, ids).tolist() == extremes
    values = uniforms(keys, Stream.ACCEPT, offset, ids)
    assert (values > 0).all()
    assert (values < 1).all()
    # At the winning end, noise has 32 bits, so neighbouring words near 0 are 2**-32 apart.
    assert float(values[1] - values[0]) == pytest.approx(2.0**-32, rel=1e-5)
    clocks = exponentials(keys, Stream.ACCEPT, offset, ids)
    assert (clocks > 0).all()
    assert clocks.isfinite().all()
    # the smallest clock wins a race
    assert float(clocks[1] - clocks[0]) == pytest.approx(2.0**-32, rel=1e-5)
