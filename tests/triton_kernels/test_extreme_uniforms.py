"""Impossible tokens, equal distributions and empty residuals, at the extremes of every coin."""

import pytest
import torch

from hf_speculate.triton_kernels import Status, verify_block, verify_rejection
from hf_speculate.triton_kernels.reference import rejection as twin
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.operations import DENSE, OPERATIONS, assert_well_formed, make_round

# No coin is 1, so that a point mass is kept where the target is certain.
LARGEST_COIN = 1.0 - 2.0**-24


def throw(monkeypatch: pytest.MonkeyPatch, coin: float) -> None:
    """Every acceptance coin falls on `coin`."""
    monkeypatch.setattr(twin, "uniforms", lambda keys, stream, at, ids: torch.full(ids.shape, coin))


@pytest.mark.parametrize("name", DENSE)
def test_a_token_that_the_draft_never_proposes_but_the_target_knows_is_kept(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    throw(monkeypatch, 1.0)
    target = torch.tensor([[[0.0, -3.0], [0.0, -3.0], [0.0, 0.0]]]).repeat(2, 1, 1)
    draft = target[:, :-1].clone()
    draft[0, 0, 1] = draft[1, 1, 1] = -torch.inf
    verdict = OPERATIONS[name](target, torch.ones(2, 2, dtype=torch.int64), draft, make_keys(2))
    assert_well_formed(verdict, 2, torch.full((2,), 2))
    assert verdict.num_accepted.tolist() == [2, 2]
    assert not verdict.status.any()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_token_that_the_target_forbids_is_rejected_at_every_coin(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Rows: both positions, each with three logits of the token in the draft, ten times."""
    sure, forbidding = [-torch.inf, 0.0, -torch.inf], [0.0, -torch.inf, 1.0]
    target = torch.tensor([[sure, sure, sure]]).repeat(60, 1, 1)
    rows, positions = torch.arange(60), torch.arange(60) % 2
    target[rows, positions] = torch.tensor(forbidding)
    draft = target[:, :-1].clone()
    draft[rows, positions] = torch.tensor([1.0, 0.0, 0.0])
    draft[rows, positions, 1] = torch.tensor([0.0, 9.0, -torch.inf])[rows // 2 % 3]
    for coin in (0.0, 1e-30, LARGEST_COIN):
        throw(monkeypatch, coin)
        verdict = OPERATIONS[name](target, torch.ones(60, 2, dtype=torch.int64), draft, make_keys(60))
        assert_well_formed(verdict, 3, torch.full((60,), 2))
        assert torch.equal(verdict.num_accepted.long(), positions)
        assert (verdict.token_ids[rows, positions] != 1).all()
        assert not verdict.status.any()


@pytest.mark.parametrize("vocab_size", [5, 50_257])
@pytest.mark.parametrize("name", DENSE)
def test_equal_distributions_are_kept_at_every_coin(
    monkeypatch: pytest.MonkeyPatch, name: str, vocab_size: int
) -> None:
    """Also if they are equal up to rounding, at most coins."""
    target, ids, _ = make_round(200 if vocab_size == 5 else 6, 3, vocab_size)
    almost = OPERATIONS[name](target, ids, target[:, :-1] + 3.0, make_keys(len(ids)))
    throw(monkeypatch, 1.0)
    for verdict in (almost, OPERATIONS[name](target, ids, target[:, :-1], make_keys(len(ids)))):
        assert_well_formed(verdict, vocab_size, torch.full((len(ids),), 3))
        assert (verdict.num_accepted == 3).all()
        assert not verdict.status.any()


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_an_empty_residual_falls_back_to_the_target_and_is_named(verify: object) -> None:
    target, _, _ = make_round(50, 2, 9)
    target[..., 4:] = -torch.inf
    ids = target[:, :-1, :4].argmin(-1)
    draft = target[:, :-1]
    wrong_sums = draft.logsumexp(-1) - 40.0  # as if the draft had been e^40 times as sure
    verdict = verify(target, ids, draft, keys=make_keys(50), draft_logsumexp=wrong_sums)  # type: ignore[operator]
    assert verdict.num_accepted.tolist() == [0] * 50
    assert verdict.status.tolist() == [int(Status.EMPTY_RESIDUAL)] * 50
    assert (verdict.token_ids[:, 0] < 4).all()
    assert len(verdict.token_ids[:, 0].unique()) == 4  # drawn from the target, not one index for all


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("name", [*DENSE, "point mass"])
def test_a_residual_without_mass_falls_back_to_the_target_and_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, position: int
) -> None:
    throw(monkeypatch, 1.0)
    sure = torch.tensor([[[0.0, -torch.inf, -torch.inf]] * 3])
    if name == "point mass":  # rejected though certain: what is left of the target has no mass
        verdict = OPERATIONS[name](sure, torch.tensor([[0, 0]]), sure[:, :-1], make_keys(1))
        position = 0
    else:
        ids = torch.tensor([[0, 0]])
        ids[0, position] = 1
        verdict = OPERATIONS[name](sure, ids, sure[:, :-1], make_keys(1))
    assert verdict.num_accepted.tolist() == [position]
    assert verdict.status.tolist() == [int(Status.EMPTY_RESIDUAL)]
    assert verdict.token_ids.tolist() == [[0] * (position + 1) + [-1] * (2 - position)]
