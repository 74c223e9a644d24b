"""Hostile rows, bad ids, extreme sizes: an id in [0, V), and the status that says what was wrong."""

import itertools

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import Status, Stream, sample, verify_greedy
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.operations import DENSE, OPERATIONS, assert_well_formed, make_round

HOSTILE = {
    "nan": (torch.nan, Status.NAN),
    "masked": (-torch.inf, Status.ALL_MASKED),
    "inf": (torch.inf, Status.POSITIVE_INF),
}
VOCAB_SIZES = [1, 127, 8193, 262_144]


def spoil(rows: Tensor, kind: str) -> None:
    """Make rows [..., V] hostile in place: wholly for "masked", else by one entry in the middle."""
    where = slice(None) if kind == "masked" else rows.shape[-1] // 2
    rows[..., where] = HOSTILE[kind][0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_chain_counts_up_to_its_first_fault(name: str) -> None:
    """Of every kind at every position, each in 80 rows: as if the chain were that short, and named if it is reached."""
    places = ["id", *itertools.product(("target", "draft") if name in DENSE else ("target",), HOSTILE)]
    faults = [(place, position) for place in places for position in range(4)]
    rows_of = [slice(80 * index, 80 * index + 80) for index in range(len(faults))]
    target, ids, draft = make_round(80 * len(faults), 4, 11)
    target, draft, keys = 4 * target, 4 * draft, make_keys(len(target), rounds=3)  # half of the tokens are kept
    positions = torch.tensor([position for _, position in faults]).repeat_interleave(80)
    flags = torch.tensor([Status.BAD_DRAFT_ID if place == "id" else HOSTILE[place[1]][1] for place, _ in faults])
    for rows, (place, position) in zip(rows_of, faults, strict=True):
        if place[0] == "target":
            spoil(target[rows, position], place[1])
    shorter = OPERATIONS[name](target, ids, draft, keys, positions)
    for rows, (place, position) in zip(rows_of, faults, strict=True):
        if place == "id":
            ids[rows, position], ids[rows, position + 1 :] = -1, 11
        elif place[0] == "draft":
            spoil(draft[rows, position], place[1])
    verdict = OPERATIONS[name](target, ids, draft, keys)
    assert_well_formed(verdict, 11, torch.full((len(target),), 4))
    assert torch.equal(verdict.num_accepted, shorter.num_accepted)
    reached = verdict.num_accepted == positions
    expected = torch.where(reached, flags.repeat_interleave(80), shorter.status)  # a residual may be empty before it
    assert torch.equal(verdict.status.long(), expected)
    is_target = torch.tensor([place[0] == "target" for place, _ in faults]).repeat_interleave(80)
    assert torch.equal(verdict.token_ids[~(reached & is_target)], shorter.token_ids[~(reached & is_target)])
    assert reached.view(-1, 80).any(1).all()
    assert (~reached)[positions > 0].view(-1, 80).any(1).all()


@pytest.mark.parametrize("vocab_size", [1, 3, 8193])
def test_sample_of_a_hostile_row_stays_in_range_and_shows_it(vocab_size: int) -> None:
    logits = torch.randn(len(HOSTILE), vocab_size, generator=torch.Generator().manual_seed(0))
    for row, kind in enumerate(HOSTILE):
        spoil(logits[row], kind)
    expected = torch.tensor([value for value, _ in HOSTILE.values()])
    for temperature in (0.0, 1.0, 0.5, torch.tensor([0.0, 1.0, 0.0])):
        drawn = sample(logits, keys=make_keys(len(HOSTILE)), stream=Stream.DRAFT, temperature=temperature)
        assert ((drawn.token_ids >= 0) & (drawn.token_ids < vocab_size)).all()
        assert torch.equal(drawn.logsumexp.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_bad_draft_id_is_refused_and_named(name: str) -> None:
    small = (-1, 50, 2**31 - 1, -(2**31))
    for dtype, bad_ids in ((torch.int32, small), (torch.int64, (*small, 2**40, -(2**63)))):
        num_rows = len(bad_ids)
        target, _, _ = make_round(num_rows, 3, 50)
        ids = target[:, :-1].argmax(-1)
        target.scatter_(-1, target.argmax(-1, keepdim=True), 60.0)  # so that every verifier keeps the argmax
        ids[:, 1] = torch.tensor(bad_ids)
        verdict = OPERATIONS[name](target, ids.to(dtype), target[:, :-1], make_keys(num_rows))
        assert_well_formed(verdict, 50, torch.full((num_rows,), 3))
        assert verdict.num_accepted.tolist() == [1] * num_rows
        assert verdict.status.tolist() == [int(Status.BAD_DRAFT_ID)] * num_rows
        assert torch.equal(verdict.token_ids[:, 1], target[:, 1].argmax(-1))  # drawn from the target itself


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_vocabulary_size_keeps_in_range(vocab_size: int) -> None:
    target, ids, draft = make_round(2, 2, vocab_size)
    for operation in OPERATIONS.values():
        verdict = operation(target, ids, draft, make_keys(2))
        assert_well_formed(verdict, vocab_size, torch.full((2,), 2))
        assert verdict.status.tolist() == [0, 0]
    last = torch.full((2, vocab_size), -torch.inf)
    last[:, -1] = 0.0
    drawn = sample(last, keys=make_keys(2), stream=Stream.DRAFT)
    assert drawn.token_ids.tolist() == [vocab_size - 1] * 2
    assert verify_greedy(last.unsqueeze(1), ids[:, :0]).token_ids.tolist() == [[vocab_size - 1]] * 2


@pytest.mark.parametrize("name", OPERATIONS)
def test_lengths_out_of_range_act_as_the_nearest_in_range(name: str) -> None:
    target, ids, draft = make_round(4, 2, 11)
    for dtype in (torch.int32, torch.int64):
        lens = torch.tensor([0, 0, 2, 2], dtype=dtype)
        wild = OPERATIONS[name](target, ids, draft, make_keys(4), torch.tensor([-5, 0, 2, 100], dtype=dtype))
        tame = OPERATIONS[name](target, ids, draft, make_keys(4), lens)
        assert all(torch.equal(mine, yours) for mine, yours in zip(wild, tame, strict=True))
        assert_well_formed(wild, 11, lens)
        assert wild.status.tolist() == [0] * 4


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


@pytest.mark.parametrize("name", OPERATIONS)
def test_logits_that_require_gradients_are_taken_and_nothing_is_recorded(name: str) -> None:
    target, ids, draft = make_round(2, 2, 5000)
    verdict = OPERATIONS[name](target.requires_grad_(), ids, draft.requires_grad_(), make_keys(2))
    assert_well_formed(verdict, 5000, torch.full((2,), 2))
    drawn = sample(target[:, 0], keys=make_keys(2), stream=Stream.DRAFT, temperature=0.5)
    assert not drawn.logsumexp.requires_grad
