"""Every edge on the kernels: an id in [0, V), and the status that says what was wrong. Many edges share a call."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import (
    NoiseKeys,
    Status,
    Stream,
    Verdict,
    sample,
    uniforms,
    verify_greedy,
    verify_rejection,
)
from hf_speculate.triton_kernels.noise import row_seeds
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.on_triton import DEVICE, assert_same, on_triton, verify_on_triton
from tests.triton_kernels.operations import OPERATIONS, assert_well_formed, make_round

pytest.importorskip("triton", reason="needs Triton")

HOSTILE = {torch.nan: Status.NAN, -torch.inf: Status.ALL_MASKED, torch.inf: Status.POSITIVE_INF}
BAD_IDS = [-1, 50, 2**31 - 1, -(2**31), 2**40, -(2**63)]
VOCAB_SIZES = [1, 7, 127, 1013, 8193, 32_000, 50_257]
LARGE_VOCAB_SIZES = [128_256, 151_936, 262_144]


def spoil(row: Tensor, value: float) -> None:
    """Make a row [V] hostile in place: wholly by -inf, else by one entry in the middle."""
    row[slice(None) if value == -torch.inf else row.shape[-1] // 2] = value


def sure_round(num_rows: int, num_draft_tokens: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Target, ids and draft of which every verifier keeps all."""
    target, _, _ = make_round(num_rows, num_draft_tokens, vocab_size)
    ids = target[:, :-1].argmax(-1)
    target.scatter_(-1, target.argmax(-1, keepdim=True), 60.0)
    return target, ids, target[:, :-1].clone()


@pytest.mark.parametrize("num_draft_tokens", [2, 8])  # 8 positions are tested at once
@pytest.mark.parametrize("name", OPERATIONS)
def test_hostile_rows_bad_ids_and_short_chains_are_named_as_by_the_twin(name: str, num_draft_tokens: int) -> None:
    """Rows of the target, of the draft, of both, and rows after the end of a chain, which are not named."""
    last = num_draft_tokens
    places = [(value, position) for value in HOSTILE for position in (0, 1, last)]
    pairs = [(value, other) for value in (*HOSTILE, 0.0) for other in HOSTILE]
    num_rows = len(places) + len(pairs) + len(BAD_IDS) + 6
    target, ids, draft = sure_round(num_rows, last, 50)
    lens, row = torch.full((num_rows,), last), iter(range(num_rows))
    for value, position in places:
        spoil(target[next(row), position], value)
    for value, other in pairs:
        at = next(row)
        spoil(draft[at, 1], other)
        if value:
            spoil(target[at, 1], value)
    for bad_id in BAD_IDS:
        ids[next(row), 1] = bad_id
    for length in (-5, 1, 100):
        lens[next(row)] = length
    for value in HOSTILE:
        at = next(row)
        ids[at, 0] = target[at, 0].argmin()  # rejected by every verifier
        target[at, 0, ids[at, 0]], draft[at, 0] = -300.0, 0.0
        spoil(target[at, 1], value)
        spoil(draft[at, 1], value)
    rows = torch.arange(num_rows)[:: 1 if last == 2 else 8]  # the interpreter is slow
    case = (target[rows], ids[rows], draft[rows], make_keys(num_rows).rows(rows), lens[rows])
    verdict, twin = verify_on_triton(name, *case), OPERATIONS[name](*case, backend="torch")
    assert_well_formed(verdict, 50, lens[rows].clamp(0, last))
    assert torch.equal(verdict.num_accepted, twin.num_accepted)
    assert torch.equal(verdict.status, twin.status)
    has_distribution = rows >= len(places) + len(pairs) - len(HOSTILE)  # else any id in range is emitted
    assert torch.equal(verdict.token_ids[has_distribution], twin.token_ids[has_distribution])
    assert {0, 1, last} <= set(twin.num_accepted.tolist())
    assert len(twin.status.unique()) >= (5 if last == 2 else 3)
    assert last > 2 or not twin.status[-6:].any()


@pytest.mark.parametrize("temperature", [0.0, 0.5, torch.tensor([0.0, 1.0, 1.0])])
@pytest.mark.parametrize("vocab_size", [1, 5000])
def test_sample_of_a_hostile_row_stays_in_range_and_shows_it(vocab_size: int, temperature: float | Tensor) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
    for row, value in enumerate(HOSTILE):
        spoil(logits[row], value)
    drawn = on_triton(sample, logits, keys=make_keys(3), stream=Stream.DRAFT, temperature=temperature)
    assert ((drawn.token_ids >= 0) & (drawn.token_ids < vocab_size)).all()
    assert torch.equal(drawn.logsumexp.nan_to_num(nan=7.0), torch.tensor(list(HOSTILE)).nan_to_num(nan=7.0))


@cache
def extreme_keys() -> NoiseKeys:
    """Two rows whose acceptance coin for token 1 is the least and the greatest of four million."""
    seeds = row_seeds(1, 4_000_000)
    nothing = torch.zeros_like(seeds)
    offsets, ones = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    coins = uniforms(NoiseKeys(seeds, nothing, nothing), Stream.ACCEPT, offsets, ones).flatten()
    picked = torch.stack([seeds[coins.argmin()], seeds[coins.argmax()]])
    assert coins.min() < 1e-6 < 1 - 1e-6 < coins.max()
    return NoiseKeys(picked, nothing[:2], nothing[:2])


@pytest.mark.parametrize("verifier", ["rejection", "rejection with draft sums", "block"])
def test_nothing_and_certainty_are_decided_alike_by_the_least_and_the_greatest_coin(verifier: str) -> None:
    keys, ids = extreme_keys(), torch.tensor([[1, 1]] * 2)
    open_row = [0.0, -3.0, 1.0]
    # The draft cannot have proposed what the target knows: kept.
    target = torch.tensor([[open_row] * 3] * 2)
    draft = torch.tensor([[[2.0, -torch.inf, 1.0], open_row]] * 2)  # elsewhere unlike the target
    verdict = verify_on_triton(verifier, target, ids, draft, keys, torch.tensor([1, 1]))
    assert verdict.num_accepted.tolist() == [1, 1]
    assert verdict.status.tolist() == [0, 0]
    # The target forbids it, whatever the draft says: rejected, and not emitted.
    target[:, 0, 1] = -torch.inf
    for draft_logit in (0.0, -torch.inf):
        draft[:, 0, 1] = draft_logit
        verdict = verify_on_triton(verifier, target, ids, draft, keys)
        assert_well_formed(verdict, 3, torch.tensor([2, 2]))
        assert verdict.num_accepted.tolist() == verdict.status.tolist() == [0, 0]
        assert (verdict.token_ids[:, 0] != 1).all()
    # Equal distributions: accepted by every coin.
    target = torch.tensor([[open_row] * 3] * 2)
    assert verify_on_triton(verifier, target, ids, target[:, :-1], keys).num_accepted.tolist() == [2, 2]


def test_a_point_mass_on_what_the_target_forbids_is_refused() -> None:
    target = torch.tensor([[[0.0, -torch.inf, 1.0]] * 2] * 2)
    verdict = on_triton(verify_rejection, target, torch.tensor([[1]] * 2), keys=extreme_keys())
    assert verdict.num_accepted.tolist() == verdict.status.tolist() == [0, 0]
    assert (verdict.token_ids[:, 0] != 1).all()


def assert_serves_vocabulary(vocab_size: int, names: Any) -> None:
    """Ids in range from random rows, and the last id from rows that allow nothing else."""
    target, ids, draft = make_round(1, 1, vocab_size)
    for name in names:
        verdict = verify_on_triton(name, target, ids, draft, make_keys(1))
        assert_well_formed(verdict, vocab_size, torch.ones(1))
        assert verdict.status.tolist() == [0]
    last = torch.full((1, vocab_size), -torch.inf)
    last[:, -1] = 0.0
    drawn = on_triton(sample, last, keys=make_keys(1), stream=Stream.DRAFT)
    assert drawn.token_ids.tolist() == [vocab_size - 1]
    assert on_triton(verify_greedy, last[None], ids[:, :0]).token_ids.tolist() == [[vocab_size - 1]]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_vocabulary_size_keeps_in_range(vocab_size: int) -> None:
    assert_serves_vocabulary(vocab_size, OPERATIONS if vocab_size < 10_000 else ["greedy", "rejection", "coupled"])


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", LARGE_VOCAB_SIZES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_large_vocabularies_keep_in_range_in_every_verifier(name: str, vocab_size: int) -> None:
    assert_serves_vocabulary(vocab_size, [name])


@pytest.mark.parametrize(
    ("name", "distance"),
    [("greedy", 2**32), ("rejection", 2**31), ("block", 2**32), ("coupled", 2**31), ("typical, sampled", 2**31)],
)
def test_rows_farther_apart_than_32_bits_are_found(name: str, distance: int) -> None:
    target, ids, draft = (tensor.bfloat16() for tensor in make_round(2, 2, 64))
    # Untouched memory is not committed: only the two rows at its ends are.
    buffer = torch.empty(distance + 6 * 64, dtype=torch.bfloat16, device=DEVICE)
    far_target = buffer.as_strided((2, 3, 64), (distance, 64, 1))
    far_draft = buffer.as_strided((2, 2, 64), (distance, 64, 1), 3 * 64)
    far_target.copy_(target)
    far_draft.copy_(draft)
    far = verify_on_triton(name, far_target, ids.long(), far_draft, make_keys(2))
    assert_well_formed(far, 64, torch.full((2,), 2))
    assert_same(far, OPERATIONS[name](target, ids.long(), draft, make_keys(2), backend="torch"))


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_rows_and_no_drafted_tokens_are_fine(name: str) -> None:
    for num_rows, num_draft_tokens in ((0, 0), (0, 3), (3, 0)):
        target, ids, draft = make_round(num_rows, num_draft_tokens, 11)
        verdict: Verdict = verify_on_triton(name, target, ids, draft, make_keys(num_rows))
        assert verdict.token_ids.shape == (num_rows, num_draft_tokens + 1)
        assert_well_formed(verdict, 11, torch.full((num_rows,), num_draft_tokens))
        assert verdict.status.tolist() == [0] * num_rows


@pytest.mark.parametrize("vocab_size", [6, 5000])
def test_greedy_ties_go_to_the_lowest_index(vocab_size: int) -> None:
    logits = torch.zeros(2, 2, vocab_size, dtype=torch.bfloat16)
    logits[..., [2, 4, vocab_size - 1]] = 1.0
    verdict = on_triton(verify_greedy, logits, torch.tensor([[2], [4]]))
    assert verdict.token_ids.tolist() == [[2, 2], [2, -1]]
    assert verdict.status.tolist() == [0, 0]
