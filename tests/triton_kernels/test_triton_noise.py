"""The noise of the kernels is that of the twins, bit for bit."""

import pytest
import torch

from hf_speculate.triton_kernels import NoiseKeys, Stream, exponentials, uniforms
from hf_speculate.triton_kernels.noise import stream_offset

triton = pytest.importorskip("triton", reason="needs Triton")
import triton.language as tl  # noqa: E402

from hf_speculate.triton_kernels.kernels import noise  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 1024
# Series and logarithm meet at 2**-5; both are good to a few units in the last place of float32.
CLOCK_TOLERANCE = 2e-6


@triton.jit
def noise_kernel(
    seeds_ptr, rounds_ptr, positions_ptr, coins_ptr, clocks_ptr, STREAM: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0)
    token_ids = tl.arange(0, WIDTH)
    state = noise.noise_states(
        tl.load(seeds_ptr + row), tl.load(rounds_ptr + row), tl.load(positions_ptr + row), STREAM
    )  # fmt: skip
    tl.store(coins_ptr + row * WIDTH + token_ids, noise.uniforms(state, token_ids))
    tl.store(clocks_ptr + row * WIDTH + token_ids, noise.exponentials(state, token_ids))


@pytest.mark.parametrize("stream", Stream)
def test_kernels_draw_the_same_numbers(stream: Stream) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = NoiseKeys(*(torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator) for _ in range(3)))
    coins = torch.full((40, WIDTH), torch.nan, device=DEVICE)
    clocks = torch.full((40, WIDTH), torch.nan, device=DEVICE)
    noise_kernel[(40,)](*(key.to(DEVICE) for key in keys), coins, clocks, STREAM=stream_offset(stream), WIDTH=WIDTH)
    here, token_ids = torch.zeros(1, 1, dtype=torch.int64), torch.arange(WIDTH)
    assert torch.equal(coins.cpu(), uniforms(keys, stream, here, token_ids))
    wanted = exponentials(keys, stream, here, token_ids)
    assert torch.allclose(clocks.cpu(), wanted, rtol=CLOCK_TOLERANCE, atol=0.0)
    assert wanted.min() < 2**-5 < wanted.max()  # both branches were taken
