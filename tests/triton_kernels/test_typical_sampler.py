"""`TypicalAcceptanceSampler` means what vLLM's class of this name means."""

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import ConfigError, ShapeError, TypicalAcceptanceSampler, verify_typical
from tests.triton_kernels import oracle
from tests.triton_kernels.host_syncs import NoHostSync

# A comparison closer than this may go either way in float32.
BORDER = 1e-5
SAMPLER = TypicalAcceptanceSampler(0.09, 0.3)
STRICT = TypicalAcceptanceSampler(0.09, 0.3, strict_mode=True)


def make_batch(num_rows: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Target probabilities [B, 4, V], bonus ids [B, 1], and ids [B, 3] of which most are likely."""
    generator = torch.Generator().manual_seed(vocab_size)
    target = (3 * torch.randn(num_rows, 4, vocab_size, generator=generator)).softmax(-1)
    ids = torch.multinomial(target[:, :-1].flatten(0, 1), 1, generator=generator).view(num_rows, 3)
    bonus = torch.randint(0, vocab_size, (num_rows, 1), generator=generator)
    return target, bonus, ids


@pytest.mark.parametrize(("threshold", "alpha"), [(0.09, 0.3), (0.3, 0.9)])
@pytest.mark.parametrize("vocab_size", [5, 2000])
def test_every_row_is_the_rule_by_hand(vocab_size: int, threshold: float, alpha: float) -> None:
    target, bonus, ids = make_batch(60, vocab_size)
    with NoHostSync():
        token_ids = TypicalAcceptanceSampler(threshold, alpha)(target, bonus, target[:, :-1], ids)
    assert token_ids.dtype == torch.int64
    lengths = []
    for row in range(60):
        expected, margin = oracle.accept_typical(target[row].log(), ids[row].tolist(), threshold, alpha, 1e-5)
        if margin > BORDER:
            lengths.append(len(expected))
            expected = [*expected[:3], int(bonus[row])] if len(expected) == 4 else expected
            assert token_ids[row].tolist() == expected + [-1] * (4 - len(expected))
    assert len(lengths) > 50
    assert len(set(lengths)) > 2


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


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_the_bonus_token_is_the_callers_and_bad_ids_and_rows_end_the_chain(shape: tuple[int, ...]) -> None:
    target = torch.zeros(6, 3, 6)
    target[..., 2] = 1.0
    target[3:, 1] = torch.tensor([torch.nan, torch.inf, 0.0]).unsqueeze(-1)
    ids = torch.tensor([[2, 2], [2, 0], [2**31 - 1, 2], [2, 2], [2, 2], [2, 2]], dtype=torch.int32)
    bonus = torch.full(shape, 5, dtype=torch.int32)
    expected = [[2, 2, 5], [2, 2, -1], [2, -1, -1]] + [[2, -1, -1]] * 3
    assert SAMPLER(target, bonus, target[:, :-1], ids).tolist() == expected
    without = TypicalAcceptanceSampler(0.09, 0.3, disable_bonus_tokens=True)
    assert without(target, bonus, target[:, :-1], ids).tolist() == [[2, 2, -1], *expected[1:]]


def test_the_most_probable_token_is_found_where_a_logarithm_would_round_it_away() -> None:
    small, large = 0.25, 0.25 + 2.0**-25
    target = torch.tensor([[[small, large, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]])
    token_ids = TypicalAcceptanceSampler(0.5, 9.0)(target, torch.tensor([0]), None, torch.tensor([[3]]))
    assert token_ids.tolist() == [[1, -1]]


@pytest.mark.parametrize(("num_rows", "num_draft_tokens"), [(0, 3), (0, 0), (3, 0)])
def test_no_rows_and_no_drafted_tokens_are_fine(num_rows: int, num_draft_tokens: int) -> None:
    target = torch.full((num_rows, num_draft_tokens + 1, 7), 1 / 7)
    ids = torch.zeros(num_rows, num_draft_tokens, dtype=torch.int64)
    for sampler in (SAMPLER, STRICT):
        token_ids = sampler(target, torch.full((num_rows,), 6), target[:, :-1], ids)
        assert token_ids.tolist() == [[6]] * num_rows


def test_an_argument_that_does_not_fit_is_named() -> None:
    target, bonus, ids = make_batch(3, 30)
    for sampler, error, words, args in [
        (SAMPLER, ShapeError, "target_with_bonus_probs must be", (target[0], bonus, None, ids)),
        (SAMPLER, ShapeError, "draft_token_ids must be", (target, bonus, None, ids.float())),
        (SAMPLER, ShapeError, "bonus_token_ids must be", (target, bonus[:2], None, ids)),
        (STRICT, ConfigError, "draft_token_ids must be", (target, bonus, None, ids - 30)),
        (STRICT, ConfigError, "bonus_token_ids must be", (target, bonus + 30, None, ids)),
        (STRICT, ShapeError, "draft_token_ids must be on cpu", (target, bonus, None, ids.to("meta"))),
        (STRICT, ShapeError, "draft_probs must be", (target, bonus, target, ids)),
        (TypicalAcceptanceSampler(0.1, 0.3, backend="a"), ConfigError, "backend must be", (target, bonus, None, ids)),
    ]:
        with pytest.raises(error, match=words):
            sampler(*args)
    with pytest.raises(ConfigError, match="posterior_threshold must be"):
        TypicalAcceptanceSampler(0.0, 0.3)
