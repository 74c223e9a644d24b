"""`chain_speculative_sampling` means what FlashInfer's function of this name means."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from hf_speculate.triton_kernels import (
    ConfigError,
    NoiseKeys,
    ShapeError,
    Verdict,
    chain_speculative_sampling,
    row_seeds,
)
from tests.triton_kernels.distributions import (
    PASS_P_VALUE,
    count_cells,
    draw_drafts,
    p_value,
    rank_reversed_logits,
    rejection_distribution,
)
from tests.triton_kernels.host_syncs import NoHostSync

NUM_TRIALS = 200_000
# The documented example: the second token is impossible, and only token 0 is left in its place.
DRAFT = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]])
IDS = torch.tensor([[2, 1]], dtype=torch.int32)
TARGET = torch.tensor([[[0.0, 0.1, 0.6, 0.3], [1.0, 0.0, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1]]])


def make_batch(num_rows: int, num_draft_tokens: int = 3, vocab_size: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """Draft probabilities, ids drawn from them, and target probabilities not far from them."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(num_rows, num_draft_tokens + 1, vocab_size, generator=generator)
    draft = (target[:, :-1] + torch.randn(num_rows, num_draft_tokens, vocab_size, generator=generator)).softmax(-1)
    ids = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).view(num_rows, num_draft_tokens)
    return draft, ids.int(), target.softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_documented_example_gives_the_documented_result(dtype: torch.dtype) -> None:
    draft, target = DRAFT.to(dtype), TARGET.to(dtype)
    for seed in (None, 0, 1, -5, 2**64 - 1, torch.tensor([9])):
        for ids in (IDS, IDS.long()):
            token_ids, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=seed)
            assert token_ids.tolist() == [[2, 0, -1]]
            assert accepted.tolist() == emitted.tolist() == [1]
            assert token_ids.dtype == accepted.dtype == emitted.dtype == torch.int32


def test_ids_and_counters_have_their_exact_distributions_though_rows_do_not_sum_to_one() -> None:
    vocab_size, num_draft_tokens = 8, 3
    target, draft = rank_reversed_logits(vocab_size, num_draft_tokens)
    seeds = row_seeds(11, NUM_TRIALS)
    zeros = torch.zeros_like(seeds)
    ids = draw_drafts(draft, NoiseKeys(seeds, zeros, zeros))  # the call's own keys: streams keep them apart
    generator = torch.Generator().manual_seed(0)
    scales = 1.0 + 0.01 * torch.rand(2, num_draft_tokens + 1, 1, generator=generator)
    token_ids, accepted, emitted = chain_speculative_sampling(
        (draft.softmax(-1) * scales[0, :-1]).expand(NUM_TRIALS, -1, -1),
        ids,
        (target.softmax(-1) * scales[1]).expand(NUM_TRIALS, -1, -1),
        seed=11,
    )
    counts = count_cells(Verdict(token_ids.long(), emitted, zeros), vocab_size)
    assert p_value(counts, rejection_distribution(target, draft)) > PASS_P_VALUE
    passed = torch.ones(1, dtype=torch.float64)  # probability of the number of positions that pass, each by itself
    for overlap in torch.minimum(target[:-1].double().softmax(-1), draft.double().softmax(-1)).sum(-1):
        passed = pad(passed * (1 - overlap), (0, 1)) + pad(passed * overlap, (1, 0))
    assert p_value(torch.bincount(accepted, minlength=num_draft_tokens + 1), passed) > PASS_P_VALUE
    # The rejected position's own coin says no for both counters.
    rejected = emitted < num_draft_tokens
    assert (accepted >= emitted).all()
    assert (accepted[rejected] < num_draft_tokens).all()
    assert (accepted[~rejected] == num_draft_tokens).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counters_are_added_to_in_place(dtype: torch.dtype) -> None:
    draft, ids, target = make_batch(40)
    _, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=1)
    counters = torch.full((40,), 100, dtype=dtype), torch.full((40,), 1000, dtype=dtype)
    for calls in (1, 2):
        returned = chain_speculative_sampling(draft, ids, target, *counters, seed=1)[1:]
        assert all(one is other for one, other in zip(returned, counters, strict=True))
        assert torch.equal(counters[0], (100 + calls * accepted).to(dtype))
        assert torch.equal(counters[1], (1000 + calls * emitted).to(dtype))


def test_a_row_depends_on_its_own_seed_and_offset_alone() -> None:
    """All rows are one row repeated: what differs in the result comes from the noise."""
    draft, ids, target = (part.expand(64, *part.shape[1:]) for part in make_batch(1))

    def call(rows: slice = slice(64), **options: Any) -> Tensor:
        return chain_speculative_sampling(draft[rows], ids[rows], target[rows], **options)[0]

    whole = call(seed=5)
    assert len(whole.unique(dim=0)) > 10  # one seed gives every row its own
    assert torch.equal(call(slice(9), seed=5), whole[:9])
    seeds = row_seeds(5, 64)
    for same in (torch.tensor([5]), torch.tensor([5], dtype=torch.int32), seeds):
        assert torch.equal(call(seed=same, offset=0), whole)
    assert torch.equal(call(slice(7, 20, 3), seed=seeds[7:20:3]), whole[7:20:3])
    changed = call(seed=seeds.index_fill(0, torch.tensor([3]), 999))
    assert (changed != whole).any(1).nonzero().tolist() == [[3]]
    later = call(seed=5, offset=1)
    assert (later != whole).any(1).sum() > 10
    assert torch.equal(call(seed=5, offset=torch.tensor([1])), later)
    mixed = call(seed=5, offset=torch.arange(64) % 2)
    assert torch.equal(mixed[::2], whole[::2])
    assert torch.equal(mixed[1::2], later[1::2])


def test_without_a_seed_the_generator_draws_one() -> None:
    target = torch.full((4, 1, 5000), 1 / 5000)
    draft, ids = target[:, :0], torch.zeros(4, 0, dtype=torch.int64)

    def calls(seeded: torch.Generator, **options: Any) -> Tensor:
        seeded.manual_seed(4)
        return torch.cat([chain_speculative_sampling(draft, ids, target, **options)[0] for _ in range(3)])

    own = torch.Generator()
    for seeded, options in ((own, {"generator": own}), (torch.default_generator, {})):
        assert len(calls(seeded, **options).unique()) == 12
        assert torch.equal(calls(seeded, **options), calls(seeded, **options))


def test_bad_ids_and_rows_without_a_distribution_end_the_chain() -> None:
    _, ids, target = make_batch(10)
    draft = target[:, :-1].clone()  # every good id is kept
    ids[:3, 1] = torch.tensor([-1, 50, 2**31 - 1], dtype=torch.int32)
    target[3:7, 2] = torch.tensor([torch.nan, torch.inf, 0.0, -1.0]).unsqueeze(-1)
    draft[7:, 0] = torch.tensor([torch.nan, torch.inf, 0.0]).unsqueeze(-1)
    target[7:, 0] = one_hot(torch.tensor(4), 50).float()
    token_ids, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=0)
    assert emitted.tolist() == [1] * 3 + [2] * 4 + [0] * 3
    assert accepted.tolist() == [2] * 10
    assert ((token_ids[:3, 1] >= 0) & (token_ids[:3, 1] < 50)).all()
    assert torch.equal(token_ids[3:7, :2], ids[3:7, :2])
    assert token_ids[7:, 0].tolist() == [4] * 3  # drawn from the target
    assert (token_ids[:, 2:] == -1).all()


@pytest.mark.parametrize(("num_rows", "num_draft_tokens"), [(0, 3), (0, 0), (3, 0), (3, 3)])
def test_empty_rounds_are_fine_and_nothing_waits_for_the_device(num_rows: int, num_draft_tokens: int) -> None:
    target = torch.full((num_rows, num_draft_tokens + 1, 7), 1 / 7)
    ids, counters = torch.zeros(num_rows, num_draft_tokens, dtype=torch.int32), torch.zeros(2, num_rows).int()
    for seed in (None, 4, torch.tensor([4]), torch.arange(num_rows)):
        with NoHostSync():
            options = {"seed": seed, "offset": torch.tensor([1])}
            token_ids, _, emitted = chain_speculative_sampling(target[:, :-1], ids, target, *counters, **options)
        assert ((token_ids >= 0) & (token_ids < 7)).all()
        assert token_ids.shape == (num_rows, num_draft_tokens + 1)
    assert emitted.tolist() == [4 * num_draft_tokens] * num_rows


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draft_probs", TARGET),
        ("draft_token_ids", IDS[:, :1]),
        ("target_probs", TARGET[0]),
        ("seed", torch.arange(2)),
        ("offset", torch.tensor(2)),
        ("maybe_output_accepted_token_num", torch.zeros(2, dtype=torch.int32)),
        ("maybe_output_emitted_draft_token_num", torch.zeros(1)),
        ("backend", "cuda"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"draft_probs": DRAFT, "draft_token_ids": IDS, "target_probs": TARGET}
    with pytest.raises((ShapeError, ConfigError), match=f"{name} must be"):
        chain_speculative_sampling(**arguments | {name: value})
