"""A round's draws are those of `sample`, one position after another."""

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import ConfigError, Draws, Stream, sample
from hf_speculate.triton_kernels.draws import MAX_SHARED_NUMEL
from tests.triton_kernels.distributions import make_keys

NUM_ROWS, NUM_DRAWS = 3, 5


def make_logits(vocab_size: int, dtype: torch.dtype) -> Tensor:
    """[NUM_ROWS, NUM_DRAWS, V], rows without a distribution among them."""
    logits = torch.randn(NUM_ROWS, NUM_DRAWS, vocab_size, generator=torch.Generator().manual_seed(4)) * 3
    logits[0, 1, 0] = torch.nan
    logits[1, 2] = -torch.inf
    logits[2, 3, vocab_size // 2 :] = torch.inf
    logits[2, 4, 5:] = -torch.inf
    logits[:, 0, 9:] = -torch.inf  # of wide rows `sample` then looks at pieces
    return logits.to(dtype)


@pytest.mark.parametrize("stream", [Stream.DRAFT, Stream.RACE])
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, torch.float32), (37, torch.float16), (100, torch.float64), (4099, torch.bfloat16), (40_000, torch.float32)],
)
def test_every_draw_is_that_of_sample_and_shared_noise_is_made_once(
    vocab_size: int, dtype: torch.dtype, stream: Stream
) -> None:
    logits, keys, num_made = make_logits(vocab_size, dtype), make_keys(NUM_ROWS, rounds=2, positions=11), 0
    round_ = Draws(keys, stream, NUM_DRAWS, backend="torch")
    for draw in range(NUM_DRAWS):
        with torch.profiler.profile() as profile:
            ids = round_.draw(logits[:, draw])
        num_made += sum(event.name == "aten::log1p_" for event in profile.events())  # once for each noise
        keys_there = keys._replace(positions=keys.positions + draw)
        alone = sample(logits[:, draw], keys=keys_there, stream=stream, backend="torch")
        assert torch.equal(ids, alone.token_ids)
        sums = round_.logsumexps()
        assert (sums.shape, sums.dtype) == ((NUM_ROWS, draw + 1), torch.float32)
        assert torch.equal(sums[:, draw].contiguous().view(torch.int32), alone.logsumexp.view(torch.int32))  # NaN too
        exact = logits[:, draw].float().double().logsumexp(-1)
        torch.testing.assert_close(alone.logsumexp.double(), exact, atol=4e-6, rtol=0, equal_nan=True)
    assert num_made == (1 if logits.numel() <= MAX_SHARED_NUMEL else NUM_DRAWS)
    with pytest.raises(ConfigError, match=f"num_draws must cover every draw, got {NUM_DRAWS}"):
        round_.draw(logits[:, 0])
