"""Compare the distributions of samples and of verified rounds with the exact ones."""

import operator

import pytest
import torch
from torch import Tensor

from hf_speculate.kernels import ConfigError, Draws, NoiseKeys, Sampled, Stream, sample
from hf_speculate.kernels.draws import MAX_SHARED_NUMEL
from tests.kernels.distributions import (
    EXACT,
    FAIL_P_VALUE,
    PASS_P_VALUE,
    chunks,
    make_keys,
    p_value,
    rank_reversed_logits,
    round_p_value,
)
from tests.kernels.operations import OPERATIONS, make_round, warp_of

NUM_DRAWN = 250_000
# Float32 and float64 log-sum-exps of values near 10 differ by a few units in the last place.
LOGSUMEXP_TOLERANCE = 4e-6


@pytest.mark.parametrize("stream", [Stream.DRAFT, Stream.RACE])
@pytest.mark.parametrize(("vocab_size", "temperature"), [(64, 1.0), (12, 0.7)])
def test_samples_follow_the_softmax_after_temperature_and_cutoff(
    vocab_size: int, temperature: float, stream: Stream
) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    logits[3] = -torch.inf
    scaled = logits / temperature
    cutoff = scaled.sort().values[4]
    left = scaled.masked_fill(scaled < cutoff, -torch.inf).double()
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for keys in chunks(NUM_DRAWN):
        rows = logits.expand(keys.seeds.shape[0], -1)
        cutoffs = cutoff.expand(len(rows))
        drawn = sample(rows, keys=keys, stream=stream, temperature=temperature, row_cutoffs=cutoffs)
        counts += torch.bincount(drawn.token_ids, minlength=vocab_size)
        expected = left.logsumexp(-1).expand(len(rows))
        torch.testing.assert_close(
            drawn.logsumexp.double(), expected, atol=LOGSUMEXP_TOLERANCE, rtol=0
        )
    assert p_value(counts, left.softmax(-1)) > PASS_P_VALUE


def draw(logits: torch.Tensor, keys: NoiseKeys) -> Sampled:
    return sample(logits, keys=keys, stream=Stream.DRAFT, backend="torch")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("vocab_size", [64, 8192])
def test_compiled_code_draws_the_same_tokens(vocab_size: int) -> None:
    keys, logits = make_keys(3, positions=9), torch.randn(3, vocab_size)
    logits[:, 40:] = -torch.inf  # so the eager reference reads wide rows in pieces
    eager, compiled = draw(logits, keys), torch.compile(draw, fullgraph=True)(logits, keys)
    assert torch.equal(eager.token_ids, compiled.token_ids)
    torch.testing.assert_close(eager.logsumexp, compiled.logsumexp)


def test_compiled_sample_serves_all_batch_sizes() -> None:
    """Avoid slices up to the batch size, because torch 2.11 recompiles them for every size."""
    bounds: list[object] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        for node in graph.graph.nodes:
            keys = node.args[1] if node.target is operator.getitem else ()
            slices = [
                key
                for key in (keys if isinstance(keys, tuple) else (keys,))
                if isinstance(key, slice)
            ]
            bounds.extend(bound for key in slices for bound in (key.start, key.stop))
        return graph

    logits, keys = torch.randn(4, 50), make_keys(4)
    # after calls with other vocabularies, V would be dynamic and slices could end there
    torch.compiler.reset()
    for tensor in (logits, *keys):
        torch._dynamo.mark_dynamic(tensor, 0)
    torch.compile(draw, backend=keep, fullgraph=True)(logits, keys)
    assert bounds
    assert not any(isinstance(bound, torch.fx.Node) for bound in bounds)


NUM_ROWS, NUM_DRAWS = 3, 5


def make_logits(vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Return logits [NUM_ROWS, NUM_DRAWS, V]; some rows have no distribution."""
    logits = (
        torch.randn(NUM_ROWS, NUM_DRAWS, vocab_size, generator=torch.Generator().manual_seed(4)) * 3
    )
    logits[0, 1, 0] = torch.nan
    logits[1, 2] = -torch.inf
    logits[2, 3, vocab_size // 2 :] = torch.inf
    logits[2, 4, 5:] = -torch.inf
    logits[:, 0, 9:] = -torch.inf  # so `sample` reads wide rows in pieces
    return logits.to(dtype)


@pytest.mark.parametrize("stream", [Stream.DRAFT, Stream.RACE])
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (1, torch.float32),
        (37, torch.float16),
        (100, torch.float64),
        (4099, torch.bfloat16),
        (40_000, torch.float32),
    ],
)
def test_several_draws_equal_those_of_sample(
    vocab_size: int, dtype: torch.dtype, stream: Stream
) -> None:
    logits, keys, num_made = (
        make_logits(vocab_size, dtype),
        make_keys(NUM_ROWS, rounds=2, positions=11),
        0,
    )
    round_ = Draws(keys, stream, NUM_DRAWS, backend="torch")
    for draw in range(NUM_DRAWS):
        with torch.profiler.profile() as profile:
            ids = round_.draw(logits[:, draw])
        # count the computations of noise
        num_made += sum(event.name == "aten::log1p_" for event in profile.events())
        keys_there = keys._replace(positions=keys.positions + draw)
        alone = sample(logits[:, draw], keys=keys_there, stream=stream, backend="torch")
        assert torch.equal(ids, alone.token_ids)
        sums = round_.logsumexps()
        assert (sums.shape, sums.dtype) == ((NUM_ROWS, draw + 1), torch.float32)
        # compares NaN as well
        assert torch.equal(
            sums[:, draw].contiguous().view(torch.int32), alone.logsumexp.view(torch.int32)
        )
        exact = logits[:, draw].float().double().logsumexp(-1)
        torch.testing.assert_close(
            alone.logsumexp.double(), exact, atol=4e-6, rtol=0, equal_nan=True
        )
    assert num_made == (1 if logits.numel() <= MAX_SHARED_NUMEL else NUM_DRAWS)
    with pytest.raises(ConfigError, match=f"num_draws must cover every draw, got {NUM_DRAWS}"):
        round_.draw(logits[:, 0])


NUM_TRIALS = 2_000_000
# The controls fail by many more orders of magnitude than the assertion requires.
NUM_CONTROL_TRIALS = 250_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "vocab_size", "num_draft_tokens"),
    [("rejection", *sizes) for sizes in ((3, 5), (8, 4), (16, 3), (64, 2))]
    + [("block", *sizes) for sizes in ((3, 6), (8, 3), (16, 3))]
    + [("coupled", *sizes) for sizes in ((3, 3), (16, 2))],
)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_joint_distribution_is_exact_over_many_trials(
    name: str, vocab_size: int, num_draft_tokens: int, spread: float
) -> None:
    logits = [spread * row for row in rank_reversed_logits(vocab_size, num_draft_tokens, seed=1)]
    assert round_p_value(name, *logits, NUM_TRIALS, OPERATIONS[name]) > PASS_P_VALUE


@pytest.mark.parametrize("name", EXACT)
def test_joint_distribution_is_exact_for_drafts_of_the_draft(name: str) -> None:
    target, draft = rank_reversed_logits(16, 2)
    rounds = (name, target, draft, NUM_CONTROL_TRIALS, OPERATIONS[name])
    assert round_p_value(*rounds) > PASS_P_VALUE
    assert round_p_value(*rounds, drawn_from=draft / 1.5) < FAIL_P_VALUE


@pytest.mark.parametrize("name", ["greedy", "coupled", "coupled, warped"])
@pytest.mark.parametrize("vocab_size", [3, 20_000])
def test_greedy_and_coupled_emit_the_tokens_of_plain_decoding(name: str, vocab_size: int) -> None:
    target, _, draft = make_round(60, 3, vocab_size)
    keys = make_keys(60, seed=8, positions=31)
    warp = (
        warp_of(target, keys)
        if name.endswith("warped")
        else {"row_cutoffs": torch.full((60, 4), -torch.inf)}
    )
    plain = target.argmax(-1)  # [B, K+1]
    for position in range(4) if name != "greedy" else ():
        row_warp = warp | {"row_cutoffs": warp["row_cutoffs"][:, position]}
        keys_there = keys._replace(rounds=keys.rounds + 5, positions=keys.positions + position)
        plain[:, position] = sample(
            target[:, position], keys=keys_there, stream=Stream.RACE, **row_warp
        ).token_ids
    for ids in (draft.argmax(-1), plain[:, :-1], torch.full_like(plain[:, :-1], -1)):
        verdict = OPERATIONS[name](target, ids, draft, keys)
        agrees = (ids == plain[:, :-1]).long().cumprod(-1).sum(-1)
        assert torch.equal(verdict.num_accepted.long(), agrees)
        emitted = torch.arange(4) <= agrees.unsqueeze(-1)
        assert torch.equal(verdict.token_ids, torch.where(emitted, plain, -1))
