"""Hostile rows, bad ids, extreme sizes: an id in [0, V), and the status that says what was wrong."""

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import (
    Status,
    Stream,
    _rejection,
    sample,
    verify_greedy,
    verify_rejection,
    verify_typical,
)
from tests.triton_kernels.laws import make_keys
from tests.triton_kernels.operations import OPERATIONS, assert_well_formed, make_round

HOSTILE = {
    "nan": (torch.nan, Status.NAN),
    "masked": (-torch.inf, Status.ALL_MASKED),
    "inf": (torch.inf, Status.POSITIVE_INF),
}
VOCAB_SIZES = [1, 7, 127, 1013, 8193, 32_000, 50_257, 128_256, 151_936, 262_144]


def spoil(rows: Tensor, kind: str) -> None:
    """Make rows [..., V] hostile in place: wholly for "masked", else by one entry in the middle."""
    where = slice(None) if kind == "masked" else rows.shape[-1] // 2
    rows[..., where] = HOSTILE[kind][0]


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_hostile_target_row_ends_the_chain_and_is_named(name: str, kind: str, position: int) -> None:
    target, _, _ = make_round(4, 2, 5000)
    ids = target[:, :-1].argmax(-1)
    target.scatter_(-1, target.argmax(-1, keepdim=True), 60.0)  # so that every verifier keeps the argmax
    spoil(target[:, position], kind)
    verdict = OPERATIONS[name](target, ids, target[:, :-1].nan_to_num(posinf=0.0, neginf=0.0), make_keys(4), None)
    assert_well_formed(verdict, 5000, torch.full((4,), 2))
    assert verdict.num_accepted.tolist() == [position] * 4
    assert verdict.status.tolist() == [int(HOSTILE[kind][1])] * 4


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_hostile_row_after_the_end_is_not_named(name: str, kind: str) -> None:
    target, _, draft = make_round(4, 2, 50)
    ids = target[:, :-1].argmin(-1)
    target[:, 0].scatter_(-1, ids[:, :1], -300.0)  # refused by every verifier
    spoil(target[:, 1:], kind)
    spoil(draft[:, 1:], kind)
    verdict = OPERATIONS[name](target, ids, draft, make_keys(4), None)
    assert_well_formed(verdict, 50, torch.full((4,), 2))
    assert verdict.num_accepted.tolist() == [0] * 4
    assert verdict.status.tolist() == [0] * 4


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ["rejection", "rejection with draft sums"])
def test_a_hostile_draft_row_refuses_and_the_target_is_drawn_from(name: str, kind: str) -> None:
    target, ids, draft = make_round(64, 2, 5)
    target[:, 0, 1:] = -torch.inf
    spoil(draft[:, 0], kind)
    verdict = OPERATIONS[name](target, ids.fill_(0), draft, make_keys(64), None)
    assert verdict.token_ids[:, 0].tolist() == [0] * 64
    assert verdict.num_accepted.tolist() == [0] * 64
    assert verdict.status.tolist() == [int(HOSTILE[kind][1])] * 64


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5, torch.tensor([0.0, 1.0])])
@pytest.mark.parametrize("vocab_size", [1, 3, 8193])
def test_sample_of_a_hostile_row_stays_in_range_and_shows_it(
    kind: str, temperature: float | Tensor, vocab_size: int
) -> None:
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(0))
    spoil(logits, kind)
    drawn = sample(logits, keys=make_keys(2), stream=Stream.DRAFT, temperature=temperature)
    assert ((drawn.token_ids >= 0) & (drawn.token_ids < vocab_size)).all()
    expected = torch.full((2,), HOSTILE[kind][0])
    assert torch.equal(drawn.logsumexp.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("bad_id", [-1, 50, 2**31 - 1, -(2**31), 2**40, -(2**63)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_bad_draft_id_is_refused_and_named(name: str, bad_id: int) -> None:
    target, _, _ = make_round(8, 3, 50)
    ids = target[:, :-1].argmax(-1)
    target.scatter_(-1, target.argmax(-1, keepdim=True), 60.0)
    ids[:, 1] = bad_id
    dtype = torch.int32 if -(2**31) <= bad_id < 2**31 else torch.int64
    verdict = OPERATIONS[name](target, ids.to(dtype), target[:, :-1], make_keys(8), None)
    assert_well_formed(verdict, 50, torch.full((8,), 3))
    assert verdict.num_accepted.tolist() == [1] * 8
    assert verdict.status.tolist() == [int(Status.BAD_DRAFT_ID)] * 8
    assert torch.equal(verdict.token_ids[:, 1], target[:, 1].argmax(-1))  # drawn from the target itself


def throw(monkeypatch: pytest.MonkeyPatch, coin: float) -> None:
    """Every acceptance coin falls on `coin`."""
    monkeypatch.setattr(_rejection, "uniforms", lambda keys, stream, at, ids: torch.full(ids.shape, coin))


def test_a_token_that_the_draft_never_proposes_but_the_target_knows_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    throw(monkeypatch, 1.0)
    target = torch.tensor([[[0.0, -3.0], [0.0, 0.0]]])
    draft = torch.tensor([[[0.0, -torch.inf]]])
    assert verify_rejection(target, torch.tensor([[1]]), draft, keys=make_keys(1)).num_accepted.tolist() == [1]


@pytest.mark.parametrize("draft_of_token", [0.0, -torch.inf, None])
def test_a_token_that_the_target_forbids_is_refused_at_every_coin(
    monkeypatch: pytest.MonkeyPatch, draft_of_token: float | None
) -> None:
    throw(monkeypatch, 0.0)
    target = torch.tensor([[[0.0, -torch.inf], [0.0, 0.0]]])
    draft = None if draft_of_token is None else torch.tensor([[[0.0, draft_of_token]]])
    verdict = verify_rejection(target, torch.tensor([[1]]), draft, keys=make_keys(1))
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.token_ids.tolist() == [[0, -1]]


@pytest.mark.parametrize("vocab_size", [5, 4096, 50_257])
def test_equal_laws_are_kept_at_every_coin(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    throw(monkeypatch, 1.0)
    target, ids, _ = make_round(6, 3, vocab_size)
    for name in ("rejection", "rejection with draft sums"):
        verdict = OPERATIONS[name](target, ids, target[:, :-1], make_keys(6), None)
        assert verdict.num_accepted.tolist() == [3] * 6


def test_an_empty_residual_falls_back_to_the_target_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids, _ = make_round(50, 1, 9)
    target[..., 4:] = -torch.inf
    ids = target[:, 0, :4].argmin(-1, keepdim=True)
    wrong_sums = target[:, :1].logsumexp(-1) - 40.0  # as if the draft had been e^40 times as sure
    verdict = verify_rejection(target, ids, target[:, :1], keys=make_keys(50), draft_logsumexp=wrong_sums)
    assert verdict.num_accepted.tolist() == [0] * 50
    assert verdict.status.tolist() == [int(Status.EMPTY_RESIDUAL)] * 50
    assert (verdict.token_ids[:, 0] < 4).all()
    throw(monkeypatch, 1.0)
    verdict = verify_rejection(torch.tensor([[[0.0, -torch.inf]] * 2]), torch.tensor([[0]]), keys=make_keys(1))
    assert verdict.status.tolist() == [int(Status.EMPTY_RESIDUAL)]
    assert verdict.token_ids.tolist() == [[0, -1]]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_vocabulary_size_keeps_in_range(vocab_size: int) -> None:
    target, ids, draft = make_round(2, 1, vocab_size)
    for operation in OPERATIONS.values():
        verdict = operation(target, ids, draft, make_keys(2), None)
        assert_well_formed(verdict, vocab_size, torch.ones(2))
        assert verdict.status.tolist() == [0, 0]
    last = torch.full((2, vocab_size), -torch.inf)
    last[:, -1] = 0.0
    drawn = sample(last, keys=make_keys(2), stream=Stream.DRAFT)
    assert drawn.token_ids.tolist() == [vocab_size - 1] * 2
    assert verify_greedy(last.unsqueeze(1), ids[:, :0]).token_ids.tolist() == [[vocab_size - 1]] * 2


@pytest.mark.parametrize("distance", [2**31, 2**32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_farther_apart_than_32_bits_are_found(name: str, distance: int) -> None:
    target, ids, draft = (tensor.bfloat16() for tensor in make_round(2, 1, 64))
    # Untouched memory is not committed: only the two rows at its ends are.
    buffer = torch.empty(distance + 4 * 64, dtype=torch.bfloat16)
    far_target = buffer.as_strided((2, 2, 64), (distance, 64, 1))
    far_draft = buffer.as_strided((2, 1, 64), (distance, 64, 1), 128)
    far_target.copy_(target)
    far_draft.copy_(draft)
    near = OPERATIONS[name](target, ids.long(), draft, make_keys(2), None)
    far = OPERATIONS[name](far_target, ids.long(), far_draft, make_keys(2), None)
    assert all(torch.equal(mine, yours) for mine, yours in zip(near, far, strict=True))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("num_rows", "num_draft_tokens"), [(0, 0), (0, 3), (1, 0), (3, 0)])
def test_no_rows_and_no_drafted_tokens_are_fine(name: str, num_rows: int, num_draft_tokens: int) -> None:
    target, ids, draft = make_round(num_rows, num_draft_tokens, 11)
    verdict = OPERATIONS[name](target, ids, draft, make_keys(num_rows), None)
    assert verdict.token_ids.shape == (num_rows, num_draft_tokens + 1)
    assert_well_formed(verdict, 11, torch.zeros(num_rows))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_out_of_range_act_as_the_nearest_in_range(dtype: torch.dtype) -> None:
    target, ids, draft = make_round(4, 2, 11)
    for operation in OPERATIONS.values():
        wild = operation(target, ids, draft, make_keys(4), torch.tensor([-5, 0, 2, 100], dtype=dtype))
        tame = operation(target, ids, draft, make_keys(4), torch.tensor([0, 0, 2, 2], dtype=dtype))
        assert all(torch.equal(mine, yours) for mine, yours in zip(wild, tame, strict=True))


@pytest.mark.parametrize("vocab_size", [6, 20_000])
def test_greedy_ties_go_to_the_lowest_index(vocab_size: int) -> None:
    logits = torch.zeros(1, 2, vocab_size, dtype=torch.bfloat16)
    logits[..., [2, 4, vocab_size - 1]] = 1.0
    assert verify_greedy(logits, torch.tensor([[2]])).token_ids.tolist() == [[2, 2]]
    assert verify_greedy(logits, torch.tensor([[4]])).token_ids.tolist() == [[2, -1]]
    # Two float64 logits that float32 cannot tell apart are a tie.
    close = torch.zeros(1, 1, vocab_size, dtype=torch.float64)
    close[..., 3], close[..., 5] = 1.0, 1.0 + 1e-12
    assert verify_greedy(close, torch.zeros(1, 0, dtype=torch.int64)).token_ids.tolist() == [[3]]


@pytest.mark.parametrize("verify", [verify_rejection, verify_typical])
def test_mixed_temperatures_act_row_by_row(verify: object) -> None:
    target, ids, _ = make_round(6, 3, 40)
    keys = make_keys(6)
    mixed = torch.tensor([0.0, 0.7, 1.0, 0.0, 2.0, 1e-3])
    together = verify(target, ids, keys=keys, temperature=mixed)  # type: ignore[operator]
    for row, temperature in enumerate(mixed.tolist()):
        rows = torch.tensor([row])
        alone = verify(target[rows], ids[rows], keys=keys.rows(rows), temperature=temperature)  # type: ignore[operator]
        assert torch.equal(alone.token_ids[0], together.token_ids[row])
    greedy = verify_greedy(target, ids)
    assert torch.equal(together.token_ids[[0, 3]], greedy.token_ids[[0, 3]])


def test_cutoffs_act_as_masked_logits() -> None:
    target, ids, draft = make_round(6, 3, 40)
    temperature = torch.full((6,), 0.8)
    scaled = target / temperature.view(-1, 1, 1)
    cutoffs = scaled.topk(10).values[..., -1]
    masked = scaled.masked_fill(scaled < cutoffs.unsqueeze(-1), -torch.inf)
    keys = make_keys(6)
    cut = verify_rejection(target, ids, draft, keys=keys, temperature=temperature, row_cutoffs=cutoffs)
    assert torch.equal(cut.token_ids, verify_rejection(masked, ids, draft, keys=keys).token_ids)
    cut = verify_typical(target, ids, temperature=temperature, row_cutoffs=cutoffs)
    assert torch.equal(cut.token_ids, verify_typical(masked, ids).token_ids)


@pytest.mark.parametrize("name", OPERATIONS)
def test_logits_that_require_gradients_are_taken_and_nothing_is_recorded(name: str) -> None:
    target, ids, draft = make_round(2, 2, 5000)
    verdict = OPERATIONS[name](target.requires_grad_(), ids, draft.requires_grad_(), make_keys(2), None)
    assert_well_formed(verdict, 5000, torch.full((2,), 2))
    drawn = sample(target[:, 0], keys=make_keys(2), stream=Stream.DRAFT, temperature=0.5)
    assert not drawn.logsumexp.requires_grad
