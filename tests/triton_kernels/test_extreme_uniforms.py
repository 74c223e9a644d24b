"""Impossible tokens and equal distributions, at the extremes of every acceptance coin."""

import pytest
import torch

from hf_speculate.triton_kernels import Status
from hf_speculate.triton_kernels.reference import rejection as twin
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.operations import DENSE, OPERATIONS, assert_well_formed, make_round

# No coin is 1, so that a point mass is kept where the target is certain.
LARGEST_COIN = 1.0 - 2.0**-24


def throw(monkeypatch: pytest.MonkeyPatch, coin: float) -> None:
    """Every acceptance coin falls on `coin`."""
    monkeypatch.setattr(twin, "uniforms", lambda keys, stream, at, ids: torch.full(ids.shape, coin))


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
def test_equal_distributions_and_tokens_unknown_to_the_draft_are_kept_at_every_coin(
    monkeypatch: pytest.MonkeyPatch, name: str, vocab_size: int
) -> None:
    """Also if the distributions are equal up to rounding, at most coins."""
    target, ids, _ = make_round(200 if vocab_size == 5 else 6, 3, vocab_size)
    keys = make_keys(len(ids))
    almost = OPERATIONS[name](target, ids, target[:, :-1] + 3.0, keys)
    throw(monkeypatch, 1.0)
    equal = OPERATIONS[name](target, ids, target[:, :-1], keys)
    draft = target[:, :-1].clone()
    draft[::2, 0].scatter_(-1, ids[::2, :1], -torch.inf)
    draft[1::2, 1].scatter_(-1, ids[1::2, 1:2], -torch.inf)
    unknown = OPERATIONS[name](target, ids, draft, keys, 1 + torch.arange(len(ids)) % 2)
    for verdict, lens in ((almost, 3), (equal, 3), (unknown, 1 + torch.arange(len(ids)) % 2)):
        assert (verdict.num_accepted == lens).all()
        assert not verdict.status.any()


def test_a_point_mass_rejected_though_certain_leaves_an_empty_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    throw(monkeypatch, 1.0)
    sure = torch.tensor([[[0.0, -torch.inf, -torch.inf]] * 3])
    verdict = OPERATIONS["point mass"](sure, torch.tensor([[0, 0]]), sure[:, :-1], make_keys(1))
    assert verdict.status.tolist() == [int(Status.EMPTY_RESIDUAL)]
    assert verdict.token_ids.tolist() == [[0, -1, -1]]
