"""Test that hostile rows, bad ids, ties and extreme coins give valid ids and the right status."""

from functools import cache

import pytest
import torch

from hf_speculate.kernels import NoiseKeys, Status, Stream, row_seeds, sample, uniforms
from tests.kernels.distributions import make_keys
from tests.kernels.on_triton import BACKENDS, on
from tests.kernels.operations import (
    DENSE,
    HOSTILE,
    OPERATIONS,
    assert_well_formed,
    make_faulty_round,
    spoil,
)


@pytest.mark.parametrize("name", OPERATIONS)
def test_chain_counts_up_to_its_first_fault(name: str) -> None:
    """Place every fault at every position, in 80 rows each.

    The result must equal the result of a shorter chain, and the status contains a fault only if the
    fault is reached.
    """
    faulty = make_faulty_round(name, 80, 4, 11)
    round_, positions = (faulty.target, faulty.ids, faulty.draft), faulty.positions
    keys = make_keys(len(positions), rounds=3)
    shorter = OPERATIONS[name](*round_, keys, positions)
    verdict = OPERATIONS[name](*round_, keys)
    assert_well_formed(verdict, 11, torch.full_like(positions, 4))
    assert torch.equal(verdict.num_accepted, shorter.num_accepted)
    reached = verdict.num_accepted == positions
    # a residual may be empty before the fault
    expected = torch.where(reached, faulty.flags, shorter.status)
    assert torch.equal(verdict.status.long(), expected)
    has_distribution = ~(reached & faulty.is_target)
    assert torch.equal(verdict.token_ids[has_distribution], shorter.token_ids[has_distribution])
    assert reached.view(-1, 80).any(1).all()
    assert (~reached)[positions > 0].view(-1, 80).any(1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [1, 3, 8192, 8193])
def test_samples_of_hostile_rows_stay_in_range(vocab_size: int, backend: str) -> None:
    logits = torch.randn(len(HOSTILE) + 1, vocab_size, generator=torch.Generator().manual_seed(0))
    for row, value in enumerate(HOSTILE):
        spoil(logits[row], value)
    logits[-1, :-1], logits[-1, -1] = -torch.inf, 2.0
    keys, sums = make_keys(len(logits)), torch.tensor([*HOSTILE, 2.0]).nan_to_num(nan=7.0)
    for temperature in (0.0, 1.0, torch.tensor([0.0, 1.0, 0.0, 1.0])):
        drawn = on(backend, sample, logits, keys=keys, stream=Stream.DRAFT, temperature=temperature)
        assert ((drawn.token_ids >= 0) & (drawn.token_ids < vocab_size)).all()
        assert int(drawn.token_ids[-1]) == vocab_size - 1
        assert torch.equal(drawn.logsumexp.nan_to_num(nan=7.0), sums)
    for name in ("greedy", "rejection", "coupled"):
        round_ = logits[-1:, None], torch.zeros(1, 0, dtype=torch.int64), logits[-1:, None][:, :0]
        assert on(backend, OPERATIONS[name], *round_, make_keys(1)).token_ids.tolist() == [
            [vocab_size - 1]
        ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [6, 20_000])
def test_greedy_ties_go_to_the_lowest_index(vocab_size: int, backend: str) -> None:
    logits = torch.zeros(2, 2, vocab_size, dtype=torch.float64)
    # In float32, these two float64 logits round to a tie.
    logits[..., [2, 4, vocab_size - 1]] = torch.tensor([1.0, 1.0 + 1e-12, 1.0], dtype=torch.float64)
    keys, ids = make_keys(2), torch.tensor([[2], [4]])
    for dtype in (torch.bfloat16, torch.float64):
        verdict = on(backend, OPERATIONS["greedy"], logits.to(dtype), ids, None, keys)
        assert verdict.token_ids.tolist() == [[2, 2], [2, -1]]
        for temperature in (0.0, torch.zeros(2)):
            options = {"keys": keys, "stream": Stream.DRAFT, "temperature": temperature}
            drawn = on(backend, sample, logits[0].to(dtype), **options)
            assert drawn.token_ids.tolist() == [2, 2]
            assert drawn.logsumexp.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("name", DENSE)
def test_empty_residual_falls_back_to_the_target(name: str, position: int) -> None:
    """Make token 0 certain except at `position`, where both models forbid the drafted token."""
    target = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf, -torch.inf]).repeat(50, 3, 1)
    target[:, position, :4] = torch.tensor([1.0, 0.5, 1.0, 0.5])
    ids = torch.zeros(50, 2, dtype=torch.int64)
    ids[:, position] = 4
    verdict = OPERATIONS[name](target, ids, target[:, :-1].clone(), make_keys(50))
    assert verdict.num_accepted.tolist() == [position] * 50
    assert verdict.status.tolist() == [int(Status.EMPTY_RESIDUAL)] * 50
    assert verdict.token_ids[:, position].unique().tolist() == [0, 1, 2, 3]


@cache
def extreme_keys() -> NoiseKeys:
    """Return two rows with the lowest and highest acceptance coins of four million for token 1."""
    seeds = row_seeds(1, 4_000_000)
    nothing = torch.zeros_like(seeds)
    offsets, ones = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    coins = uniforms(NoiseKeys(seeds, nothing, nothing), Stream.ACCEPT, offsets, ones).flatten()
    picked = torch.stack([seeds[coins.argmin()], seeds[coins.argmax()]])
    assert coins.min() < 1e-6 < 1 - 1e-6 < coins.max()
    return NoiseKeys(picked, nothing[:2], nothing[:2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_extreme_coins_respect_zero_and_full_probability(name: str, backend: str) -> None:
    open_row, forbidding, unknown = [0.0, -3.0, 1.0], [0.0, -torch.inf, 1.0], [2.0, -torch.inf, 1.0]
    # target row, draft row, number of accepted tokens
    rounds = [(forbidding, open_row, 0), (forbidding, unknown, 0)]
    if name in DENSE:
        rounds += [(open_row, unknown, 1), (open_row, open_row, 1)]
    target_rows, draft_rows, num_accepted = (
        torch.tensor(values).repeat_interleave(2, 0) for values in zip(*rounds, strict=True)
    )
    keys = extreme_keys().rows(torch.arange(len(num_accepted)) % 2)
    ids = torch.ones(len(num_accepted), 1, dtype=torch.int64)
    verdict = on(
        backend,
        OPERATIONS[name],
        target_rows[:, None].repeat(1, 2, 1),
        ids,
        draft_rows[:, None],
        keys,
    )
    assert_well_formed(verdict, 3, ids[:, 0])
    assert torch.equal(verdict.num_accepted.long(), num_accepted)
    assert not verdict.status.any()
    assert (verdict.token_ids[num_accepted == 0, 0] != 1).all()
