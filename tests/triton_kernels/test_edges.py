"""Hostile rows, bad ids, extreme sizes: an id in [0, V), and the status that says what was wrong."""

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import Status, Stream, Verdict, sample, verify_greedy
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.operations import DENSE, OPERATIONS, assert_well_formed, make_round

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
    verdict = OPERATIONS[name](target, ids, target[:, :-1].nan_to_num(posinf=0.0, neginf=0.0), make_keys(4))
    assert_well_formed(verdict, 5000, torch.full((4,), 2))
    assert verdict.num_accepted.tolist() == [position] * 4
    assert verdict.status.tolist() == [int(HOSTILE[kind][1])] * 4


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_hostile_row_after_the_end_is_not_named(name: str, kind: str) -> None:
    target, _, draft = make_round(4, 2, 50)
    ids = target[:, :-1].argmin(-1)
    target[:, 0].scatter_(-1, ids[:, :1], -300.0)  # rejected by every verifier
    spoil(target[:, 1:], kind)
    spoil(draft[:, 1:], kind)
    verdict = OPERATIONS[name](target, ids, draft, make_keys(4))
    assert_well_formed(verdict, 50, torch.full((4,), 2))
    assert verdict.num_accepted.tolist() == [0] * 4
    assert verdict.status.tolist() == [0] * 4


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", DENSE)
def test_a_hostile_draft_row_refuses_and_the_target_is_drawn_from(name: str, kind: str) -> None:
    target, ids, draft = make_round(64, 2, 5)
    target[:, 0, 1:] = -torch.inf
    spoil(draft[:, 0], kind)
    verdict = OPERATIONS[name](target, ids.fill_(0), draft, make_keys(64))
    assert verdict.token_ids[:, 0].tolist() == [0] * 64
    assert verdict.num_accepted.tolist() == [0] * 64
    assert verdict.status.tolist() == [int(HOSTILE[kind][1])] * 64


def make_sure_round(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """80 rounds of 4 drafted tokens that every verifier keeps about half of."""
    target, ids, draft = make_round(80, 4, vocab_size)
    return 4 * target, ids, 4 * draft


def assert_as_if_shorter(verdict: Verdict, shorter: Verdict, position: int, flag: Status) -> None:
    """The same as with `position` drafted tokens, but for `flag` where the chain got there."""
    assert torch.equal(verdict.token_ids, shorter.token_ids)
    assert torch.equal(verdict.num_accepted, shorter.num_accepted)
    assert torch.equal(verdict.status, torch.where(shorter.num_accepted == position, int(flag), 0))
    assert (shorter.num_accepted == position).any()
    assert position == 0 or (shorter.num_accepted < position).any()


@pytest.mark.parametrize("position", [0, 1, 2, 3])
@pytest.mark.parametrize("vocab_size", [11, 5000])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_chain_counts_up_to_its_first_bad_id(name: str, vocab_size: int, position: int) -> None:
    target, ids, draft = make_sure_round(vocab_size)
    keys, lens = make_keys(80, rounds=3), torch.full((80,), position)
    shorter = OPERATIONS[name](target, ids, draft, keys, lens)
    ids[:, position], ids[:, position + 1 :] = -1, vocab_size
    verdict = OPERATIONS[name](target, ids, draft, keys)
    assert_well_formed(verdict, vocab_size, torch.full((80,), 4))
    assert_as_if_shorter(verdict, shorter, position, Status.BAD_DRAFT_ID)


@pytest.mark.parametrize("position", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", DENSE)
def test_a_chain_counts_up_to_its_first_hostile_draft_row(name: str, kind: str, position: int) -> None:
    target, ids, draft = make_sure_round(11)
    keys, lens = make_keys(80, rounds=3), torch.full((80,), position)
    shorter = OPERATIONS[name](target, ids, draft, keys, lens)
    spoil(draft[:, position], kind)
    verdict = OPERATIONS[name](target, ids, draft, keys)
    assert_well_formed(verdict, 11, torch.full((80,), 4))
    assert_as_if_shorter(verdict, shorter, position, HOSTILE[kind][1])


@pytest.mark.parametrize("position", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_chain_counts_up_to_its_first_hostile_target_row(name: str, kind: str, position: int) -> None:
    target, ids, draft = make_sure_round(11)
    spoil(target[:, position], kind)
    keys, lens = make_keys(80, rounds=3), torch.full((80,), position)
    shorter = OPERATIONS[name](target, ids, draft, keys, lens)
    verdict = OPERATIONS[name](target, ids, draft, keys)
    assert_well_formed(verdict, 11, torch.full((80,), 4))
    at_row = verdict.num_accepted == position
    assert at_row.any()
    assert torch.equal(verdict.num_accepted, shorter.num_accepted)
    assert torch.equal(verdict.token_ids[~at_row], shorter.token_ids[~at_row])
    assert torch.equal(verdict.status, torch.where(at_row, int(HOSTILE[kind][1]), 0))


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
    verdict = OPERATIONS[name](target, ids.to(dtype), target[:, :-1], make_keys(8))
    assert_well_formed(verdict, 50, torch.full((8,), 3))
    assert verdict.num_accepted.tolist() == [1] * 8
    assert verdict.status.tolist() == [int(Status.BAD_DRAFT_ID)] * 8
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


@pytest.mark.parametrize("distance", [2**31, 2**32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_farther_apart_than_32_bits_are_found(name: str, distance: int) -> None:
    target, ids, draft = (tensor.bfloat16() for tensor in make_round(2, 2, 64))
    # Untouched memory is not committed: only the two rows at its ends are.
    buffer = torch.empty(distance + 6 * 64, dtype=torch.bfloat16)
    far_target = buffer.as_strided((2, 3, 64), (distance, 64, 1))
    far_draft = buffer.as_strided((2, 2, 64), (distance, 64, 1), 3 * 64)
    far_target.copy_(target)
    far_draft.copy_(draft)
    near = OPERATIONS[name](target, ids.long(), draft, make_keys(2))
    far = OPERATIONS[name](far_target, ids.long(), far_draft, make_keys(2))
    assert_well_formed(far, 64, torch.full((2,), 2))
    assert far.status.tolist() == [0, 0]
    assert all(torch.equal(mine, yours) for mine, yours in zip(near, far, strict=True))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("num_rows", "num_draft_tokens"), [(0, 0), (0, 3), (1, 0), (3, 0)])
def test_no_rows_and_no_drafted_tokens_are_fine(name: str, num_rows: int, num_draft_tokens: int) -> None:
    target, ids, draft = make_round(num_rows, num_draft_tokens, 11)
    verdict = OPERATIONS[name](target, ids, draft, make_keys(num_rows))
    assert verdict.token_ids.shape == (num_rows, num_draft_tokens + 1)
    assert_well_formed(verdict, 11, torch.full((num_rows,), num_draft_tokens))
    assert verdict.status.tolist() == [0] * num_rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_lengths_out_of_range_act_as_the_nearest_in_range(name: str, dtype: torch.dtype) -> None:
    target, ids, draft = make_round(4, 2, 11)
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
