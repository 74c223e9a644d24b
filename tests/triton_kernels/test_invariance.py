"""A row's result depends on that row alone: not on the batch, strides, threads, or what lies in fresh memory."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import (
    NoiseKeys,
    Stream,
    Verdict,
    sample,
    verify_block,
    verify_coupled,
    verify_rejection,
    verify_typical,
)
from hf_speculate.triton_kernels._inputs import Warp
from hf_speculate.triton_kernels.reference import masses as twin_masses
from hf_speculate.triton_kernels.reference import pieces as twin_pieces
from hf_speculate.triton_kernels.reference import rows as twin_rows
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.host_syncs import NoHostSync
from tests.triton_kernels.operations import OPERATIONS, SAMPLING, make_round

# 40,000 entries are more than torch gives to one thread, and cross the block-wise maximum and the sums of 4,096.
WIDTHS = [37, 40_000]


def assert_same(one: Verdict, other: Verdict) -> None:
    for field, mine, yours in zip(one._fields, one, other, strict=True):
        assert torch.equal(mine, yours), field


@pytest.mark.parametrize("vocab_size", WIDTHS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_alone_gives_what_it_gives_in_a_batch(name: str, vocab_size: int) -> None:
    operation = OPERATIONS[name]
    target, ids, draft = make_round(5, 3, vocab_size)
    keys = make_keys(5, rounds=2, positions=11)
    together = operation(target, ids, draft, keys, None)
    for rows in (torch.tensor([3]), torch.tensor([4, 0])):
        alone = operation(target[rows], ids[rows], draft[rows], keys.rows(rows), None)
        assert_same(alone, Verdict(*(field[rows] for field in together)))
        drawn, others = (
            sample(part[:, 0], keys=part_keys, stream=Stream.DRAFT)
            for part, part_keys in ((target[rows], keys.rows(rows)), (target, keys))
        )
        assert torch.equal(drawn.token_ids, others.token_ids[rows])
        assert torch.equal(drawn.logsumexp, others.logsumexp[rows])


def strided(tensor: Tensor) -> Iterator[Tensor]:
    """The same values in other layouts."""
    yield tensor.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), torch.nan)
    wide[..., 3::2] = tensor
    yield wide[..., 3::2]


@pytest.mark.parametrize("vocab_size", WIDTHS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_strides_change_nothing(name: str, vocab_size: int) -> None:
    operation = OPERATIONS[name]
    target, ids, draft = make_round(3, 2, vocab_size)
    keys = make_keys(3)
    plain = operation(target, ids, draft, keys, None)
    for other_target, other_draft in zip(strided(target), strided(draft), strict=True):
        assert_same(operation(other_target, ids.t().contiguous().t(), other_draft, keys, None), plain)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_number_of_threads_changes_nothing(name: str) -> None:
    target, ids, draft = make_round(1, 1, 150_001)
    before = torch.get_num_threads()
    verdicts = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            verdicts.append(OPERATIONS[name](target, ids, draft, make_keys(1), None))
    finally:
        torch.set_num_threads(before)
    assert_same(verdicts[0], verdicts[1])
    assert_same(verdicts[0], verdicts[2])


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_past_the_length_do_not_count(name: str) -> None:
    operation = OPERATIONS[name]
    target, ids, draft = make_round(6, 4, 23)
    keys = make_keys(6)
    for length in range(5):
        cut = operation(target[:, : length + 1], ids[:, :length], draft[:, :length], keys, None)
        poisoned = target.clone()
        poisoned[:, length + 1 :] = torch.nan
        lens = torch.full((6,), length, dtype=torch.int32)
        whole = operation(poisoned, ids.masked_fill(torch.arange(4) >= length, -1), draft, keys, lens)
        assert torch.equal(whole.token_ids[:, : length + 1], cut.token_ids)
        assert (whole.token_ids[:, length + 1 :] == -1).all()
        assert torch.equal(whole.num_accepted, cut.num_accepted)
        assert torch.equal(whole.status, cut.status)


@pytest.mark.parametrize("vocab_size", WIDTHS)
@pytest.mark.parametrize("name", ["rejection", "block"])
def test_handing_over_the_draft_sums_changes_nothing(name: str, vocab_size: int) -> None:
    target, ids, draft = make_round(4, 3, vocab_size)
    without = OPERATIONS[name](target, ids, draft, make_keys(4))
    assert_same(without, OPERATIONS[f"{name} with draft sums"](target, ids, draft, make_keys(4)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_int32_ids_and_half_precision_copies_agree(name: str) -> None:
    target, ids, draft = make_round(4, 3, 50)
    for dtype in (torch.bfloat16, torch.float16):
        half = OPERATIONS[name](target.to(dtype), ids.int(), draft.to(dtype), make_keys(4), None)
        full = OPERATIONS[name](target.to(dtype).double(), ids, draft.to(dtype).double(), make_keys(4), None)
        assert_same(half, full)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_round_repeats_its_numbers_only_under_its_own_keys(name: str) -> None:
    target = torch.zeros(200, 3, 5000)
    ids = torch.full((200, 2), -1)  # rejected, so that the first token is drawn

    def first_ids(keys: NoiseKeys) -> Tensor:
        return OPERATIONS[name](target, ids, target[:, :-1], keys).token_ids[:, 0]

    first = first_ids(make_keys(200))
    assert torch.equal(first, first_ids(make_keys(200)))
    assert len(first.unique()) > 180  # rows do not share numbers either; 196 expected
    for keys in (make_keys(200, seed=1), make_keys(200, rounds=1), make_keys(200, positions=1)):
        if name == "coupled" and keys.rounds.any():
            assert torch.equal(first_ids(keys), first)  # the race leaves the round out
        else:
            assert (first_ids(keys) == first).sum() <= 3  # 0.04 expected by chance


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN and the largest integers, as torch fills it in deterministic mode."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_is_read_from_fresh_memory(name: str, request: pytest.FixtureRequest) -> None:
    cases = [(make_round(3, num_draft_tokens, 5000), make_keys(3)) for num_draft_tokens in (0, 3)]
    clean = [OPERATIONS[name](*tensors, keys, None) for tensors, keys in cases]
    request.getfixturevalue("poisoned_memory")
    for (tensors, keys), expected in zip(cases, clean, strict=True):
        assert_same(OPERATIONS[name](*tensors, keys, None), expected)


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_operation_waits_for_the_device(name: str) -> None:
    target, ids, draft = make_round(3, 2, 5000)
    keys = make_keys(3)
    with NoHostSync():
        OPERATIONS[name](target, ids, draft, keys, torch.tensor([0, 1, 2]))
        sample(target[:, 0], keys=keys, stream=Stream.RACE, temperature=torch.ones(3))
    with NoHostSync(), pytest.raises(AssertionError, match="waits"):
        bool(target.sum() > 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.0, 0.5, 1.3])])
def test_looking_only_at_what_the_cutoffs_keep_changes_no_bit(
    temperature: float | Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, ids, draft = make_round(3, 2, 2 * twin_rows.TILE_SIZE)
    divisor = temperature.view(-1, 1, 1) if isinstance(temperature, Tensor) else temperature
    scaled = target / (torch.where(divisor == 0, 1.0, divisor) if isinstance(divisor, Tensor) else divisor)
    cutoffs = scaled.topk(8).values[..., -1]
    draft = draft.masked_fill(draft < draft.topk(8).values[..., -1:], -torch.inf)
    keys, found = make_keys(3), []
    options = {"keys": keys, "temperature": temperature, "row_cutoffs": cutoffs, "backend": "torch"}
    drawing = {**options, "row_cutoffs": cutoffs[:, 0], "stream": Stream.RACE}
    assert twin_masses._kept_masses(target, Warp(temperature, cutoffs)) is not None
    assert twin_masses._kept_masses(draft, Warp()) is not None
    for share in (twin_pieces.MAX_KEPT_SHARE, -1.0):
        monkeypatch.setattr(twin_pieces, "MAX_KEPT_SHARE", share)
        found.append(
            [
                *verify_rejection(target, ids, draft, **options),
                *verify_block(target, ids, draft, **options),
                *verify_coupled(target, ids, **options),
                *verify_typical(target, ids, **options, correction="sample"),
                *sample(target[:, 0], **drawing),
                twin_masses.row_masses(target, Warp(temperature, cutoffs)).masses,
                twin_masses.row_sums(target, Warp(temperature, cutoffs)).logsumexp,
                *twin_masses.row_masses(draft),
            ]
        )
    assert all(torch.equal(few, all_) for few, all_ in zip(*found, strict=True))
