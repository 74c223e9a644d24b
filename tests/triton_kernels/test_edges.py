"""Hostile rows, bad ids, ties: an id in [0, V), and the status that says what was wrong."""

import pytest
import torch

from hf_speculate.triton_kernels import Status, Stream, sample, verify_greedy
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.on_triton import BACKENDS, on
from tests.triton_kernels.operations import (
    DENSE,
    HOSTILE,
    OPERATIONS,
    assert_well_formed,
    make_faulty_round,
    make_round,
    spoil,
)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_chain_counts_up_to_its_first_fault(name: str) -> None:
    """Of every kind at every position, each in 80 rows: as if the chain were that short, and named if it is reached."""
    faulty = make_faulty_round(name, 80, 4, 11)
    round_, positions = (faulty.target, faulty.ids, faulty.draft), faulty.positions
    keys = make_keys(len(positions), rounds=3)
    shorter = OPERATIONS[name](*round_, keys, positions)
    verdict = OPERATIONS[name](*round_, keys)
    assert_well_formed(verdict, 11, torch.full_like(positions, 4))
    assert torch.equal(verdict.num_accepted, shorter.num_accepted)
    reached = verdict.num_accepted == positions
    expected = torch.where(reached, faulty.flags, shorter.status)  # a residual may be empty before it
    assert torch.equal(verdict.status.long(), expected)
    has_distribution = ~(reached & faulty.is_target)
    assert torch.equal(verdict.token_ids[has_distribution], shorter.token_ids[has_distribution])
    assert reached.view(-1, 80).any(1).all()
    assert (~reached)[positions > 0].view(-1, 80).any(1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [1, 3, 8193])
def test_sample_of_a_hostile_row_stays_in_range_and_shows_it(vocab_size: int, backend: str) -> None:
    logits = torch.randn(len(HOSTILE), vocab_size, generator=torch.Generator().manual_seed(0))
    for row, value in enumerate(HOSTILE):
        spoil(logits[row], value)
    for temperature in (0.0, 0.5, torch.tensor([0.0, 1.0, 0.0])):
        options = {"keys": make_keys(len(HOSTILE)), "stream": Stream.DRAFT, "temperature": temperature}
        drawn = on(backend, sample, logits, **options)
        assert ((drawn.token_ids >= 0) & (drawn.token_ids < vocab_size)).all()
        assert torch.equal(drawn.logsumexp.nan_to_num(nan=7.0), torch.tensor(list(HOSTILE)).nan_to_num(nan=7.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [7, 8193, 65_536])
def test_the_last_id_of_a_vocabulary_is_drawn(vocab_size: int, backend: str) -> None:
    last = torch.full((2, vocab_size), -torch.inf)
    last[:, -1] = 0.0
    drawn = on(backend, sample, last, keys=make_keys(2), stream=Stream.DRAFT)
    assert drawn.token_ids.tolist() == [vocab_size - 1] * 2
    for name in ("greedy", "rejection", "coupled"):
        round_ = last[:, None], torch.zeros(2, 0, dtype=torch.int64), last[:, None][:, :0]
        verdict = on(backend, OPERATIONS[name], *round_, make_keys(2))
        assert verdict.token_ids.tolist() == [[vocab_size - 1]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [6, 20_000])
def test_greedy_ties_go_to_the_lowest_index(vocab_size: int, backend: str) -> None:
    logits = torch.zeros(2, 2, vocab_size, dtype=torch.bfloat16)
    logits[..., [2, 4, vocab_size - 1]] = 1.0
    verdict = on(backend, verify_greedy, logits, torch.tensor([[2], [4]]))
    assert verdict.token_ids.tolist() == [[2, 2], [2, -1]]
    # Two float64 logits that float32 cannot tell apart are a tie.
    close = torch.zeros(1, 1, vocab_size, dtype=torch.float64)
    close[..., 3], close[..., 5] = 1.0, 1.0 + 1e-12
    assert on(backend, verify_greedy, close, torch.zeros(1, 0, dtype=torch.int64)).token_ids.tolist() == [[3]]


@pytest.mark.parametrize("name", OPERATIONS)
def test_logits_that_require_gradients_are_taken_and_nothing_is_recorded(name: str) -> None:
    target, ids, draft = make_round(2, 2, 50)
    verdict = OPERATIONS[name](target.requires_grad_(), ids, draft.requires_grad_(), make_keys(2))
    assert verdict.status.tolist() == [0, 0]
    drawn = sample(target[:, 0], keys=make_keys(2), stream=Stream.DRAFT, temperature=0.5)
    assert not drawn.logsumexp.requires_grad


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("name", DENSE)
def test_an_empty_residual_falls_back_to_the_target_and_is_named(name: str, position: int) -> None:
    """Token 0 is certain before the position; at it the two models agree, but on a token that neither allows."""
    target = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf, -torch.inf]).repeat(50, 3, 1)
    target[:, position, :4] = torch.tensor([1.0, 0.5, 1.0, 0.5])
    ids = torch.zeros(50, 2, dtype=torch.int64)
    ids[:, position] = 4
    verdict = OPERATIONS[name](target, ids, target[:, :-1].clone(), make_keys(50))
    assert verdict.num_accepted.tolist() == [position] * 50
    assert verdict.status.tolist() == [int(Status.EMPTY_RESIDUAL)] * 50
    assert verdict.token_ids[:, position].unique().tolist() == [0, 1, 2, 3]
