"""A round's draws are those of `sample`, one position after another."""

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import ConfigError, Draws, NoiseKeys, ShapeError, Stream, draws, sample
from hf_speculate.triton_kernels.noise import exponentials
from tests.triton_kernels.distributions import make_keys

NUM_ROWS, NUM_DRAWS = 3, 5


def make_logits(vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[NUM_ROWS, NUM_DRAWS, V], rows without a distribution among them."""
    logits = torch.randn(NUM_ROWS, NUM_DRAWS, vocab_size, generator=torch.Generator().manual_seed(4)) * 3
    logits[0, 1, 0] = torch.nan
    logits[1, 2] = -torch.inf
    logits[2, 3, vocab_size // 2 :] = torch.inf
    logits[2, 4, 5:] = -torch.inf
    logits[:, 0, 9:] = -torch.inf  # of wide rows `sample` then looks at pieces
    return logits.to(dtype)


def assert_as_sample(logits: Tensor, keys: NoiseKeys, stream: Stream) -> None:
    """Draw all positions, and hold ids and log-sum-exps against single draws, bit for bit."""
    round_ = Draws(keys, stream, NUM_DRAWS, backend="torch")
    for draw in range(NUM_DRAWS):
        ids = round_.draw(logits[:, draw])
        here = keys._replace(positions=keys.positions + draw)
        alone = sample(logits[:, draw], keys=here, stream=stream, backend="torch")
        assert torch.equal(ids, alone.token_ids)
        sums = round_.logsumexps()
        assert sums.shape == (NUM_ROWS, draw + 1)
        assert sums.dtype == torch.float32
        assert torch.equal(sums[:, draw].contiguous().view(torch.int32), alone.logsumexp.view(torch.int32))


@pytest.mark.parametrize("limit", [draws.MAX_SHARED_NUMEL, 0])
@pytest.mark.parametrize("vocab_size", [1, 37, 4096, 4099, 8192, 40_000])
def test_every_draw_is_that_of_sample(vocab_size: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "MAX_SHARED_NUMEL", limit)
    for stream in (Stream.DRAFT, Stream.RACE):
        assert_as_sample(make_logits(vocab_size), make_keys(NUM_ROWS, rounds=2, positions=11), stream)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_dtype_draws_as_sample_does(dtype: torch.dtype) -> None:
    assert_as_sample(make_logits(100, dtype), make_keys(NUM_ROWS), Stream.DRAFT)


@pytest.mark.parametrize(("limit", "num_passes"), [(NUM_ROWS * NUM_DRAWS * 50, 1), (NUM_ROWS * NUM_DRAWS * 50 - 1, 0)])
def test_noise_is_made_once_up_to_the_limit(limit: int, num_passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count(*args: Tensor) -> Tensor:
        calls.append(args)
        return exponentials(*args)

    monkeypatch.setattr(draws, "exponentials", count)
    monkeypatch.setattr(draws, "MAX_SHARED_NUMEL", limit)
    assert_as_sample(make_logits(50), make_keys(NUM_ROWS), Stream.DRAFT)
    assert len(calls) == num_passes


def test_one_draw_more_than_announced_raises() -> None:
    for limit in (draws.MAX_SHARED_NUMEL, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draws, "MAX_SHARED_NUMEL", limit)
            round_ = Draws(make_keys(2), Stream.DRAFT, 1)
            round_.draw(torch.zeros(2, 9))
            with pytest.raises(ConfigError, match="num_draws must cover every draw, got 1"):
                round_.draw(torch.zeros(2, 9))


def test_what_does_not_fit_raises() -> None:
    round_ = Draws(make_keys(2), Stream.DRAFT, 3)
    with pytest.raises(ShapeError, match=r"keys\.seeds must be"):
        round_.draw(torch.zeros(3, 9))
    round_.draw(torch.zeros(2, 9))
    with pytest.raises(ShapeError, match="logits must be"):
        round_.draw(torch.zeros(2, 8))
    with pytest.raises(ConfigError, match="backend must be one of"):
        Draws(make_keys(2), Stream.DRAFT, 1, backend="jax").draw(torch.zeros(2, 9))
