"""Edges of the laws themselves: impossible tokens, equal laws, empty residuals, at the extremes of every coin."""

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


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("name", DENSE)
def test_a_token_that_the_draft_never_proposes_but_the_target_knows_is_kept(
    monkeypatch: pytest.MonkeyPatch, name: str, position: int
) -> None:
    throw(monkeypatch, 1.0)
    target = torch.tensor([[[0.0, -3.0], [0.0, -3.0], [0.0, 0.0]]])
    draft = target[:, :-1].clone()
    draft[:, position, 1] = -torch.inf
    verdict = OPERATIONS[name](target, torch.tensor([[1, 1]]), draft, make_keys(1))
    assert_well_formed(verdict, 2, torch.tensor([2]))
    assert verdict.num_accepted.tolist() == [2]
    assert verdict.status.tolist() == [0]


@pytest.mark.parametrize("coin", [0.0, 1e-30, LARGEST_COIN])
@pytest.mark.parametrize("draft_of_token", [0.0, 9.0, -torch.inf])
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_token_that_the_target_forbids_is_refused_at_every_coin(
    monkeypatch: pytest.MonkeyPatch, name: str, position: int, draft_of_token: float, coin: float
) -> None:
    throw(monkeypatch, coin)
    sure, forbidding = [-torch.inf, 0.0, -torch.inf], [0.0, -torch.inf, 1.0]
    target = torch.tensor([[sure, sure, sure]]).repeat(30, 1, 1)
    target[:, position] = torch.tensor(forbidding)
    draft = target[:, :-1].clone()
    draft[:, position] = torch.tensor([1.0, draft_of_token, 0.0])
    verdict = OPERATIONS[name](target, torch.ones(30, 2, dtype=torch.int64), draft, make_keys(30))
    assert_well_formed(verdict, 3, torch.full((30,), 2))
    assert verdict.num_accepted.tolist() == [position] * 30
    assert (verdict.token_ids[:, position] != 1).all()
    assert verdict.status.tolist() == [0] * 30


@pytest.mark.parametrize("vocab_size", [5, 4096, 50_257])
@pytest.mark.parametrize("name", DENSE)
def test_equal_laws_are_kept_at_every_coin(monkeypatch: pytest.MonkeyPatch, name: str, vocab_size: int) -> None:
    throw(monkeypatch, 1.0)
    target, ids, _ = make_round(6, 3, vocab_size)
    verdict = OPERATIONS[name](target, ids, target[:, :-1], make_keys(6))
    assert_well_formed(verdict, vocab_size, torch.full((6,), 3))
    assert verdict.num_accepted.tolist() == [3] * 6
    assert verdict.status.tolist() == [0] * 6


@pytest.mark.parametrize("vocab_size", [5, 4096, 50_257])
def test_laws_equal_up_to_rounding_are_kept(vocab_size: int) -> None:
    target, ids, _ = make_round(200 if vocab_size == 5 else 6, 3, vocab_size)
    for name in DENSE:
        verdict = OPERATIONS[name](target, ids, target[:, :-1] + 3.0, make_keys(len(ids)))
        assert (verdict.num_accepted == 3).all()
        assert (verdict.status == 0).all()


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
@pytest.mark.parametrize("num_draft_tokens", [1, 2])
def test_an_empty_residual_falls_back_to_the_target_and_is_named(verify: object, num_draft_tokens: int) -> None:
    target, _, _ = make_round(50, num_draft_tokens, 9)
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
