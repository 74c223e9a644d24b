"""Test that a row's result does not depend on the batch, strides or threads."""

import pytest
import torch
from torch import Tensor

from hf_speculate.kernels import Status, Stream, Verdict, sample, verify_greedy
from hf_speculate.kernels._inputs import Warp
from hf_speculate.kernels.reference import masses as twin_masses
from hf_speculate.kernels.reference import rows as twin_rows
from tests.kernels.distributions import make_keys
from tests.kernels.on_triton import assert_same
from tests.kernels.operations import OPERATIONS, WARPABLE, NoHostSync, layouts, make_round

# 40,000 entries exceed the share of one torch thread, and the block size of 4,096 for maxima and
# sums.
WIDTHS = [37, 40_000]


@pytest.mark.parametrize("vocab_size", WIDTHS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_row_alone_gives_its_result_in_a_batch(
    name: str, vocab_size: int, request: pytest.FixtureRequest
) -> None:
    """Fill new memory with NaN, forbid host synchronisation, and check that no gradient exists."""
    target, ids, draft = make_round(5, 3, vocab_size)
    keys, lens, temperature = (
        make_keys(5, rounds=2, positions=11),
        torch.tensor([0, 1, 2, 3, 3]),
        torch.ones(5),
    )
    with NoHostSync():
        together = OPERATIONS[name](
            target.requires_grad_(), ids, draft.requires_grad_(), keys, lens
        )
        drawn = sample(target[:, 0], keys=keys, stream=Stream.DRAFT, temperature=temperature)
        with pytest.raises(AssertionError, match="waits"):
            bool(target.sum() > 0)
    assert not drawn.logsumexp.requires_grad
    assert not any(field.is_inference() for field in together), (
        "the caller may not write to the verdict"
    )
    request.getfixturevalue("poisoned_memory")
    for rows in (torch.tensor([3]), torch.tensor([4, 0])):
        alone = OPERATIONS[name](target[rows], ids[rows], draft[rows], keys.rows(rows), lens[rows])
        assert_same(alone, Verdict(*(field[rows] for field in together)))
        drawn_alone = sample(target[rows, 0], keys=keys.rows(rows), stream=Stream.DRAFT)
        assert torch.equal(drawn_alone.token_ids, drawn.token_ids[rows])
        assert torch.equal(drawn_alone.logsumexp, drawn.logsumexp[rows])


@pytest.mark.parametrize("vocab_size", WIDTHS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_strides_and_dtypes_change_nothing(name: str, vocab_size: int) -> None:
    target, ids, draft = make_round(3, 2, vocab_size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        target, draft = target.to(dtype), draft.to(dtype)
        plain = OPERATIONS[name](target.double(), ids, draft.double(), make_keys(3))
        for target_layout, draft_layout in zip(layouts(target), layouts(draft), strict=True):
            ids_layout = ids.t().contiguous().t().int()
            assert_same(
                OPERATIONS[name](target_layout, ids_layout, draft_layout, make_keys(3)), plain
            )


@pytest.mark.parametrize("name", OPERATIONS)
def test_number_of_threads_changes_nothing(name: str) -> None:
    round_, before, verdicts = make_round(1, 1, 150_001), torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            verdicts.append(OPERATIONS[name](*round_, make_keys(1)))
    finally:
        torch.set_num_threads(before)
    assert_same(verdicts[0], verdicts[1])
    assert_same(verdicts[0], verdicts[2])


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_past_the_length_do_not_count(name: str) -> None:
    target, ids, draft = make_round(6, 4, 23)
    even_rows = torch.arange(6)[:, None] % 2 == 0
    for length in (-5, 0, 1, 2, 3, 4, 100):  # lengths out of range are clamped
        end = min(max(length, 0), 4)
        cut = OPERATIONS[name](target[:, : end + 1], ids[:, :end], draft[:, :end], make_keys(6))
        poisoned = target.clone()
        poisoned[:, end + 1 :] = torch.nan
        lens = torch.full((6,), length, dtype=torch.int32)
        ended_ids = ids.masked_fill(even_rows & (torch.arange(4) >= end), -1)
        whole = OPERATIONS[name](poisoned, ended_ids, draft, make_keys(6), lens)
        assert (whole.token_ids[:, end + 1 :] == -1).all()
        assert_same(whole._replace(token_ids=whole.token_ids[:, : end + 1]), cut)


@pytest.mark.parametrize("vocab_size", WIDTHS)
@pytest.mark.parametrize("name", ["rejection", "block"])
def test_passed_draft_logsumexp_changes_nothing(name: str, vocab_size: int) -> None:
    case = (*make_round(4, 3, vocab_size), make_keys(4))
    assert_same(OPERATIONS[f"{name} with draft sums"](*case), OPERATIONS[name](*case))


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.0, 0.5, 1.3])])
def test_reading_only_tokens_within_cutoffs_changes_no_bit(temperature: float | Tensor) -> None:
    """Add one entry, so the row is not a multiple of the piece size and is read in full."""
    target, ids, draft = make_round(3, 2, 2 * twin_rows.TILE_SIZE)
    divisor = torch.as_tensor(temperature).view(-1, 1, 1)
    cutoffs = (target / divisor.where(divisor > 0, 1.0)).topk(8).values[..., -1]
    draft = draft.masked_fill(draft < draft.topk(8).values[..., -1:], -torch.inf)
    keys, warp, results = make_keys(3), Warp(temperature, cutoffs), []
    for num_more in (0, 1):
        target, draft = (
            torch.nn.functional.pad(rows, (0, num_more), value=-torch.inf)
            for rows in (target, draft)
        )
        assert (twin_masses._kept_masses(target, warp) is None) == (num_more == 1)
        assert (twin_masses._kept_masses(draft, Warp()) is None) == (num_more == 1)
        verdicts = [
            OPERATIONS[name](target, ids, draft, keys, **warp._asdict()) for name in WARPABLE
        ]
        drawn = sample(
            target[:, 0],
            keys=keys,
            stream=Stream.RACE,
            temperature=temperature,
            row_cutoffs=cutoffs[:, 0],
        )
        masses, sums = (
            twin_masses.row_masses(target, warp).masses,
            twin_masses.row_sums(target, warp).logsumexp,
        )
        draft_masses, *others = twin_masses.row_masses(draft)
        results.append([*(part for verdict in verdicts for part in verdict), *drawn, sums, *others])
        results[-1] += [rows[..., : 2 * twin_rows.TILE_SIZE] for rows in (masses, draft_masses)]
    assert all(torch.equal(few, all_) for few, all_ in zip(*results, strict=True))


@pytest.mark.parametrize("vocab_size", [40, 5000])
@pytest.mark.parametrize("name", WARPABLE)
def test_mixed_temperatures_act_row_by_row(name: str, vocab_size: int) -> None:
    target, ids, draft = make_round(6, 3, vocab_size)
    target[0, :, [2, 4, vocab_size - 1]] = 20.0  # tied, so the lowest index is the argmax
    ids[0, 0], ids[0, 1] = 2, 4
    keys = make_keys(6)
    mixed = torch.tensor([0.0, 0.7, 1.0, 0.0, 2.0, 1e-3])
    together = OPERATIONS[name](target, ids, draft, keys, temperature=mixed)
    for row, temperature in enumerate(mixed.tolist()):
        rows = torch.tensor([row])
        alone = OPERATIONS[name](
            target[rows], ids[rows], draft[rows], keys.rows(rows), temperature=temperature
        )
        assert torch.equal(alone.token_ids[0], together.token_ids[row])
    assert torch.equal(together.token_ids[[0, 3]], verify_greedy(target, ids).token_ids[[0, 3]])
    assert together.status.tolist() == [0] * 6


@pytest.mark.parametrize("name", WARPABLE)
def test_cutoffs_act_as_masked_logits(name: str) -> None:
    target, ids, draft = make_round(6, 3, 40)
    temperature = torch.full((6,), 0.8)
    scaled = target / temperature.view(-1, 1, 1)
    cutoffs = scaled.topk(10).values[..., -1]
    cutoffs[5] = 1e9  # masks all tokens
    masked = scaled.masked_fill(scaled < cutoffs.unsqueeze(-1), -torch.inf)
    cut = OPERATIONS[name](
        target, ids, draft, make_keys(6), temperature=temperature, row_cutoffs=cutoffs
    )
    assert_same(cut, OPERATIONS[name](masked, ids, draft, make_keys(6)))
    assert cut.status.tolist() == [0] * 5 + [int(Status.ALL_MASKED)]
    assert cut.num_accepted[5] == 0
    assert 0 <= cut.token_ids[5, 0] < 40
