"""`TypicalAcceptanceSampler` means what vLLM's class of this name means."""

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import ConfigError, ShapeError, TypicalAcceptanceSampler, verify_typical
from tests.triton_kernels.host_syncs import NoHostSync

# A comparison closer than this may go either way in float32.
BORDER = 1e-5
SAMPLER = TypicalAcceptanceSampler(0.09, 0.3)
STRICT = TypicalAcceptanceSampler(0.09, 0.3, strict_mode=True)


def make_batch(num_rows: int, vocab_size: int, *, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Target probabilities [B, 4, V], bonus ids [B, 1], and ids [B, 3] of which most are likely."""
    generator = torch.Generator().manual_seed(vocab_size)
    target = (spread * torch.randn(num_rows, 4, vocab_size, generator=generator)).softmax(-1)
    ids = torch.multinomial(target[:, :-1].flatten(0, 1), 1, generator=generator).view(num_rows, 3)
    bonus = torch.randint(0, vocab_size, (num_rows, 1), generator=generator)
    return target, bonus, ids


def by_hand(probs: Tensor, bonus: int, ids: list[int], threshold: float, alpha: float) -> tuple[list[int], float]:
    """One row by the rule, probabilities [K+1, V] in float64: ids and the margin of the closest comparison."""
    margin = 1.0
    for position, token_id in enumerate(ids):
        row = probs[position].double()
        entropy = -float((row * (row + 1e-5).log()).sum())
        bound = min(threshold, alpha * torch.tensor(-entropy).exp().item())
        margin = min(margin, abs(float(row[token_id]) - bound) / bound)
        if float(row[token_id]) <= bound:
            return [*ids[:position], int(row.argmax())] + [-1] * (len(ids) - position), margin
    return [*ids, bonus], margin


@pytest.mark.parametrize(("threshold", "alpha"), [(0.09, 0.3), (0.3, 0.9)])
@pytest.mark.parametrize("vocab_size", [5, 20_000])
def test_every_row_is_the_rule_by_hand(vocab_size: int, threshold: float, alpha: float) -> None:
    target, bonus, ids = make_batch(60, vocab_size)
    token_ids = TypicalAcceptanceSampler(threshold, alpha)(target, bonus, target[:, :-1], ids)
    assert token_ids.dtype == torch.int64
    compared, lengths = 0, set()
    for row in range(60):
        expected, margin = by_hand(target[row], int(bonus[row]), ids[row].tolist(), threshold, alpha)
        if margin > BORDER:
            assert token_ids[row].tolist() == expected
            lengths.add(expected.count(-1))
            compared += 1
    assert compared > 50
    assert len(lengths) > 2


def test_the_entropy_has_vllms_epsilon() -> None:
    vocab_size = 100_000
    target = torch.full((1, 2, vocab_size), 0.5 / (vocab_size - 1))
    target[..., 7] = 0.5
    # The entropy is 6.45, and 5.90 with the epsilon inside its logarithm: the bounds are 4.7e-4 and 8.2e-4.
    target[:, :, 8] = 6e-4
    ids, bonus = torch.tensor([[8]]), torch.tensor([3])
    assert SAMPLER(target, bonus, None, ids).tolist() == [[7, -1]]
    assert verify_typical(target.log(), ids).num_accepted.tolist() == [1]
    target[:, :, 8] = 1e-3
    assert SAMPLER(target, bonus, None, ids).tolist() == [[8, 3]]


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_bonus_token_is_the_callers_where_all_stay(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    target = torch.zeros(3, 3, 6)
    target[..., 2] = 1.0
    ids = torch.tensor([[2, 2], [2, 0], [1, 2]], dtype=dtype)
    bonus = torch.tensor([5, 5, 5], dtype=dtype).view(shape)
    expected = [[2, 2, 5], [2, 2, -1], [2, -1, -1]]
    assert SAMPLER(target, bonus, target[:, :-1], ids).tolist() == expected
    assert STRICT(target, bonus, target[:, :-1], ids).tolist() == expected
    without = TypicalAcceptanceSampler(0.09, 0.3, disable_bonus_tokens=True)
    assert without(target, bonus, target[:, :-1], ids).tolist() == [[2, 2, -1], *expected[1:]]


def test_the_most_probable_token_is_found_where_a_logarithm_would_round_it_away() -> None:
    small, large = 0.25, 0.25 + 2.0**-25
    target = torch.tensor([[[small, large, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]])
    assert TypicalAcceptanceSampler(0.5, 9.0)(target, torch.tensor([0]), None, torch.tensor([[3]])).tolist() == [
        [1, -1]
    ]


def test_bad_ids_and_rows_without_a_distribution_end_the_chain() -> None:
    target = torch.zeros(6, 4, 30)
    target[..., 2] = 1.0
    target[3:, 1] = torch.tensor([torch.nan, torch.inf, 0.0]).unsqueeze(-1)
    ids = torch.full((6, 3), 2)
    ids[:3, 1] = torch.tensor([-1, 30, 2**31 - 1])
    expected = [[2, 2, -1, -1]] * 3 + [[2, -1, -1, -1]] * 3
    assert SAMPLER(target, torch.zeros(6, dtype=torch.int64), None, ids).tolist() == expected


def test_no_rows_and_no_drafted_tokens_are_fine() -> None:
    for num_rows, num_draft_tokens in [(0, 3), (0, 0), (3, 0)]:
        target = torch.full((num_rows, num_draft_tokens + 1, 7), 1 / 7)
        ids = torch.zeros(num_rows, num_draft_tokens, dtype=torch.int64)
        for sampler in (SAMPLER, STRICT):
            token_ids = sampler(target, torch.full((num_rows,), 6), target[:, :-1], ids)
            assert token_ids.shape == (num_rows, num_draft_tokens + 1)
            assert (token_ids == 6).all()


def test_only_strict_mode_waits_for_the_device() -> None:
    target, bonus, ids = make_batch(3, 30)
    with NoHostSync():
        SAMPLER(target, bonus, target[:, :-1], ids)
    with NoHostSync(), pytest.raises(AssertionError, match="waits"):
        STRICT(target, bonus, target[:, :-1], ids)


def test_strict_mode_names_ids_out_of_range_and_other_devices() -> None:
    target, bonus, ids = make_batch(3, 30)
    with pytest.raises(ConfigError, match="draft_token_ids must be"):
        STRICT(target, bonus, None, ids.index_fill(1, torch.tensor([1]), -1))
    with pytest.raises(ConfigError, match="bonus_token_ids must be"):
        STRICT(target, torch.full_like(bonus, 30), None, ids)
    with pytest.raises(ShapeError, match="draft_token_ids must be on cpu"):
        STRICT(target, bonus, None, ids.to("meta"))
    with pytest.raises(ShapeError, match="draft_probs must be"):
        STRICT(target, bonus, target, ids)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_with_bonus_probs", torch.zeros(3, 4)),
        ("draft_token_ids", torch.zeros(3, 4, dtype=torch.int64)),
        ("draft_token_ids", torch.zeros(3, 3)),
        ("bonus_token_ids", torch.zeros(2, dtype=torch.int64)),
        ("bonus_token_ids", torch.zeros(3, 2, dtype=torch.int64)),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name: str, value: Tensor) -> None:
    target, bonus, ids = make_batch(3, 30)
    fitting = {"target_with_bonus_probs": target, "bonus_token_ids": bonus, "draft_probs": None, "draft_token_ids": ids}
    with pytest.raises(ShapeError, match=f"{name} must be"):
        SAMPLER(**fitting | {name: value})  # type: ignore[arg-type]


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match="posterior_threshold must be"):
        TypicalAcceptanceSampler(0.0, 0.3)
    with pytest.raises(ConfigError, match="posterior_alpha must be"):
        TypicalAcceptanceSampler(0.09, -1.0)
    target, bonus, ids = make_batch(1, 4)
    with pytest.raises(ConfigError, match="backend must be"):
        TypicalAcceptanceSampler(0.09, 0.3, backend="cuda")(target, bonus, None, ids)
