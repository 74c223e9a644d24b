"""Test the drop-in functions: FlashInfer's chain, vLLM's sampler, and a single sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from hf_speculate.kernels import (
    NoiseKeys,
    TypicalAcceptanceSampler,
    Verdict,
    chain_speculative_sampling,
    greedy_match,
    row_seeds,
    speculative_sampling,
    verify_typical,
)
from tests.kernels.distributions import (
    PASS_P_VALUE,
    count_cells,
    draw_drafts,
    p_value,
    rank_reversed_logits,
    rejection_distribution,
)
from tests.kernels.operations import NoHostSync

NUM_TRIALS = 200_000
SAMPLER = TypicalAcceptanceSampler(0.09, 0.3)
STRICT = TypicalAcceptanceSampler(0.09, 0.3, strict_mode=True)


def make_batch(
    num_rows: int, num_draft_tokens: int = 3, vocab_size: int = 50
) -> tuple[Tensor, Tensor, Tensor]:
    """Return draft probabilities, ids sampled from them, and target probabilities close to them."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(num_rows, num_draft_tokens + 1, vocab_size, generator=generator)
    draft = (
        target[:, :-1] + torch.randn(num_rows, num_draft_tokens, vocab_size, generator=generator)
    ).softmax(-1)
    ids = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).view(
        num_rows, num_draft_tokens
    )
    return draft, ids.int(), target.softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_documented_example_gives_documented_result(dtype: torch.dtype) -> None:
    """Make the second token impossible, so only token 0 can replace it."""
    draft = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]], dtype=dtype)
    target = torch.tensor(
        [[[0.0, 0.1, 0.6, 0.3], [1.0, 0.0, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1]]], dtype=dtype
    )
    ids = torch.tensor([[2, 1]])
    for seed in (None, 0, 1, -5, 2**64 - 1, torch.tensor([9])):
        token_ids, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=seed)
        assert token_ids.tolist() == [[2, 0, -1]]
        assert accepted.tolist() == emitted.tolist() == [1]
        assert token_ids.dtype == accepted.dtype == emitted.dtype == torch.int32


def test_chain_ids_and_counters_are_exact_for_unnormalised_rows() -> None:
    vocab_size, num_draft_tokens = 8, 3
    target, draft = rank_reversed_logits(vocab_size, num_draft_tokens)
    seeds = row_seeds(11, NUM_TRIALS)
    zeros = torch.zeros_like(seeds)
    # the call uses the same keys; streams separate the draws
    ids = draw_drafts(draft, NoiseKeys(seeds, zeros, zeros))
    scales = 1.0 + 0.01 * torch.rand(
        2, num_draft_tokens + 1, 1, generator=torch.Generator().manual_seed(0)
    )
    counters = torch.full((NUM_TRIALS,), 100), torch.full((NUM_TRIALS,), 1000, dtype=torch.int32)
    token_ids, *returned = chain_speculative_sampling(
        (draft.softmax(-1) * scales[0, :-1]).expand(NUM_TRIALS, -1, -1),
        ids,
        (target.softmax(-1) * scales[1]).expand(NUM_TRIALS, -1, -1),
        *counters,
        seed=11,
    )
    assert all(counter is expected for counter, expected in zip(returned, counters, strict=True))
    accepted, emitted = counters[0] - 100, counters[1] - 1000
    counts = count_cells(Verdict(token_ids.long(), emitted, zeros), vocab_size)
    assert p_value(counts, rejection_distribution(target, draft)) > PASS_P_VALUE
    # distribution of the number of accepted positions if each position is tested independently
    passed = torch.ones(1, dtype=torch.float64)
    for overlap in torch.minimum(target[:-1].double().softmax(-1), draft.double().softmax(-1)).sum(
        -1
    ):
        passed = pad(passed * (1 - overlap), (0, 1)) + pad(passed * overlap, (1, 0))
    assert p_value(torch.bincount(accepted, minlength=num_draft_tokens + 1), passed) > PASS_P_VALUE
    # The coin of the rejected position rejects it for both counters.
    rejected = emitted < num_draft_tokens
    assert (accepted >= emitted).all()
    assert (accepted[rejected] < num_draft_tokens).all()
    assert (accepted[~rejected] == num_draft_tokens).all()


def test_row_depends_on_its_seed_and_offset_only() -> None:
    """Repeat one row, so results differ only because of the noise."""
    draft, ids, target = (tensor.expand(64, *tensor.shape[1:]) for tensor in make_batch(1))

    def call(rows: slice = slice(64), **options: Any) -> Tensor:
        return chain_speculative_sampling(draft[rows], ids[rows], target[rows], **options)[0]

    whole, later = call(seed=5), call(seed=5, offset=1)
    assert len(whole.unique(dim=0)) > 10  # one seed gives different noise to every row
    assert (later != whole).any(1).sum() > 10
    seeds = row_seeds(5, 64)
    for same in (torch.tensor([5]), torch.tensor([5], dtype=torch.int32), seeds):
        assert torch.equal(call(seed=same, offset=0), whole)
    assert torch.equal(call(slice(7, 20, 3), seed=seeds[7:20:3]), whole[7:20:3])
    changed = call(seed=seeds.index_fill(0, torch.tensor([3]), 999))
    assert (changed != whole).any(1).nonzero().tolist() == [[3]]
    assert torch.equal(call(seed=5, offset=torch.tensor([1])), later)
    odd = torch.arange(64) % 2
    assert torch.equal(call(seed=5, offset=odd), torch.where(odd[:, None] == 1, later, whole))


def test_chain_ends_at_bad_ids_and_rows_without_a_distribution() -> None:
    _, ids, target = make_batch(10)
    draft = target[:, :-1].clone()  # every valid id is accepted
    ids[:3, 1] = torch.tensor([-1, 50, 2**31 - 1], dtype=torch.int32)
    target[3:7, 2] = torch.tensor([torch.nan, torch.inf, 0.0, -1.0]).unsqueeze(-1)
    draft[7:, 0] = torch.tensor([torch.nan, torch.inf, 0.0]).unsqueeze(-1)
    target[7:, 0] = one_hot(torch.tensor(4), 50).float()
    token_ids, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=0)
    assert emitted.tolist() == [1] * 3 + [2] * 4 + [0] * 3
    assert accepted.tolist() == [2] * 10
    assert ((token_ids[:3, 1] >= 0) & (token_ids[:3, 1] < 50)).all()
    assert torch.equal(token_ids[3:7, :2], ids[3:7, :2])
    assert token_ids[7:, 0].tolist() == [4] * 3  # sampled from the target
    assert (token_ids[:, 2:] == -1).all()


@pytest.mark.parametrize(("num_rows", "num_draft_tokens"), [(0, 3), (0, 0), (3, 0), (3, 3)])
def test_empty_rounds_run_without_host_sync(num_rows: int, num_draft_tokens: int) -> None:
    target = torch.full((num_rows, num_draft_tokens + 1, 7), 1 / 7)
    ids, counters = (
        torch.zeros(num_rows, num_draft_tokens, dtype=torch.int32),
        torch.zeros(2, num_rows).int(),
    )
    for seed in (None, 4, torch.tensor([4]), torch.arange(num_rows)):
        with NoHostSync():
            options = {"seed": seed, "offset": torch.tensor([1])}
            token_ids, _, emitted = chain_speculative_sampling(
                target[:, :-1], ids, target, *counters, **options
            )
            accepted = SAMPLER(target, torch.full((num_rows,), 6), None, ids)
        assert ((token_ids >= 0) & (token_ids < 7)).all()
        assert token_ids.shape == accepted.shape == (num_rows, num_draft_tokens + 1)
    assert emitted.tolist() == [4 * num_draft_tokens] * num_rows
    assert accepted[:, -1].tolist() == [6] * num_rows
    assert torch.equal(STRICT(target, torch.full((num_rows,), 6), target[:, :-1], ids), accepted)


def test_single_sequence_equals_a_chain_of_one_row() -> None:
    draft, ids, target = make_batch(1)
    target[0, 2] = torch.nan
    draft[0, 0] = target[0, 0]

    for generator in (None, torch.Generator()):
        seeded = generator or torch.default_generator
        seeded.manual_seed(4)
        calls = [
            speculative_sampling(target[0], draft[0], ids[0], generator=generator)
            for _ in range(60)
        ]
        seeded.manual_seed(4)
        for at, token in calls:
            token_ids, _, emitted = chain_speculative_sampling(
                draft, ids, target, generator=generator
            )
            assert (int(at), int(token)) == (int(emitted), int(token_ids[0, emitted]))
        assert len({(int(at), int(token)) for at, token in calls}) > 5


@pytest.mark.parametrize(
    ("candidate", "expected"), [(0, (0, 1)), (1, (1, 0)), (-1, (0, 1)), (2, (0, 1))], ids=str
)
def test_impossible_candidates_are_rejected(candidate: int, expected: tuple[int, int]) -> None:
    target, ids = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([candidate])
    for at, token in (
        greedy_match(target, ids),
        speculative_sampling(target, torch.tensor([[0.5, 0.5]]), ids),
    ):
        assert (int(at), int(token)) == expected
        assert at.dtype == token.dtype == torch.int64
        assert at.shape == token.shape == ()


def test_greedy_sampler_finds_the_most_probable_token() -> None:
    small, large = 0.25, 0.25 + 2.0**-25
    target = torch.tensor([[[small, large, 0.25, 0.25], [0.1, 0.4, 0.4, 0.1]]])
    token_ids = TypicalAcceptanceSampler(0.5, 9.0)(
        target, torch.tensor([0]), None, torch.tensor([[3]])
    )
    assert token_ids.tolist() == [[1, -1]]
    for candidate, expected in ((3, (0, 1)), (1, (1, 1))):
        assert tuple(map(int, greedy_match(target[0], torch.tensor([candidate])))) == expected
    target[0, 1] = torch.nan
    assert tuple(map(int, greedy_match(target[0], torch.tensor([1])))) == (1, -1)


@pytest.mark.parametrize(("threshold", "alpha"), [(0.09, 0.3), (0.03, 0.9)])
def test_sampler_decides_as_the_operation_on_logits(threshold: float, alpha: float) -> None:
    (_, ids, target), bonus = make_batch(300), torch.arange(300)
    token_ids = TypicalAcceptanceSampler(threshold, alpha)(target, bonus, None, ids)
    rule = {"posterior_threshold": threshold, "posterior_alpha": alpha, "entropy_epsilon": 1e-5}
    expected, num_accepted, _ = verify_typical(target.log(), ids, **rule)
    expected[num_accepted == 3, 3] = bonus[num_accepted == 3]
    assert torch.equal(token_ids, expected)
    assert len(num_accepted.unique()) == 4


def test_entropy_has_vllms_epsilon() -> None:
    vocab_size = 100_000
    target = torch.full((1, 2, vocab_size), 0.5 / (vocab_size - 1))
    target[..., 7] = 0.5
    # The entropy is 6.45, or 5.90 with the epsilon inside its logarithm. The thresholds are 4.7e-4
    # and 8.2e-4.
    target[:, :, 8] = 6e-4
    ids, bonus = torch.tensor([[8]]), torch.tensor([3])
    assert SAMPLER(target, bonus, None, ids).tolist() == [[7, -1]]
    assert verify_typical(target.log(), ids).num_accepted.tolist() == [1]
    target[:, :, 8] = 1e-3
    assert SAMPLER(target, bonus, None, ids).tolist() == [[8, 3]]


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_sampler_emits_the_bonus_token_of_the_caller(shape: tuple[int, ...]) -> None:
    target = torch.zeros(6, 3, 6)
    target[..., 2] = 1.0
    target[3:, 1] = torch.tensor([torch.nan, torch.inf, 0.0]).unsqueeze(-1)
    ids = torch.tensor([[2, 2], [2, 0], [2**31 - 1, 2], [2, 2], [2, 2], [2, 2]], dtype=torch.int32)
    bonus = torch.full(shape, 5, dtype=torch.int32)
    expected = [[2, 2, 5], [2, 2, -1], [2, -1, -1]] + [[2, -1, -1]] * 3
    assert SAMPLER(target, bonus, target[:, :-1], ids).tolist() == expected
    without = TypicalAcceptanceSampler(0.09, 0.3, disable_bonus_tokens=True)
    assert without(target, bonus, target[:, :-1], ids).tolist() == [[2, 2, -1], *expected[1:]]
