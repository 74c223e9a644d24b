"""The vectorised twins decide as plain loops in float64 do, with the same noise."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import NoiseKeys, Stream, Verdict, verify_typical
from tests.triton_kernels import oracle
from tests.triton_kernels.distributions import draw_drafts, make_keys
from tests.triton_kernels.operations import OPERATIONS, make_contested_round

# Float32 logits near 10 carry errors of 1e-6 into a log-probability; closer decisions may go either way.
BORDER = 1e-5
NUM_ROWS, NUM_DRAFT_TOKENS = 150, 4


def assert_decided(verdict: Verdict, row: int, decision: oracle.Decision) -> int:
    """Compare one row, unless it was decided at the border; 1 when it was compared."""
    if decision.margin < BORDER:
        return 0
    kept = int(verdict.num_accepted[row]) + 1
    assert verdict.token_ids[row, :kept].tolist() == decision.token_ids
    assert (verdict.token_ids[row, kept:] == -1).all()
    assert int(verdict.status[row]) == 0
    return 1


# What decides one row of target, ids and draft by its keys, temperature and cutoffs.
DECIDERS: dict[str, Callable[..., oracle.Decision]] = {
    "rejection": oracle.reject,
    "point mass": lambda target, ids, _, *rest: oracle.reject(target, ids, None, *rest),
    "block": oracle.verify_block,
    "coupled": oracle.verify_coupled,
}


def assert_all_decided(name: str, round_: tuple[Tensor, ...], keys: NoiseKeys, **warp: Tensor) -> None:
    verdict, compared = OPERATIONS[name](*round_, keys, **warp), 0
    for row in range(NUM_ROWS):
        target, ids, draft = (part[row] for part in round_)
        row_warp = [float(warp["temperature"][row]), warp["row_cutoffs"][row]] if warp else []
        decision = DECIDERS[name](target, ids.tolist(), draft, keys.rows(torch.tensor([row])), *row_warp)
        compared += assert_decided(verdict, row, decision)
    assert compared > 0.9 * NUM_ROWS


@pytest.mark.parametrize("vocab_size", [2, 37, 500])
@pytest.mark.parametrize(
    ("name", "distance"),
    [("rejection", 0.7), ("point mass", 0.7), ("block", 0.1), ("block", 0.7), ("block", 3.0), ("coupled", 0.7)],
)
def test_verifiers_decide_as_float64_does(name: str, distance: float, vocab_size: int) -> None:
    target, ids, draft = make_contested_round(NUM_ROWS, NUM_DRAFT_TOKENS, vocab_size, distance=distance)
    keys = make_keys(NUM_ROWS, seed=5, rounds=4, positions=99)
    if name == "coupled":
        raced = draw_drafts(draft, keys, Stream.RACE)
        ids = torch.where(torch.arange(NUM_ROWS)[:, None] % 2 == 0, raced, ids)
    assert_all_decided(name, (target, ids, draft), keys)


@pytest.mark.parametrize("name", DECIDERS)
def test_temperatures_and_cutoffs_decide_as_in_float64(name: str) -> None:
    target, ids, draft = make_contested_round(NUM_ROWS, NUM_DRAFT_TOKENS, 50)
    temperature = torch.linspace(0.3, 2.0, NUM_ROWS)
    cutoffs = (target / temperature.view(-1, 1, 1)).kthvalue(30, dim=-1).values
    keys = make_keys(NUM_ROWS, seed=6)
    assert_all_decided(name, (target, ids, draft), keys, temperature=temperature, row_cutoffs=cutoffs)


@pytest.mark.parametrize("vocab_size", [2, 37, 500])
@pytest.mark.parametrize("epsilon", [0.0, 1e-5])
def test_typical_is_the_rule_of_the_paper_and_draws_its_correction_from_the_target(
    vocab_size: int, epsilon: float
) -> None:
    target, ids, _ = make_contested_round(NUM_ROWS, NUM_DRAFT_TOKENS, vocab_size)
    rule = {"posterior_threshold": 0.2, "posterior_alpha": 0.4, "entropy_epsilon": epsilon}
    keys = make_keys(NUM_ROWS, seed=2)
    argmax = verify_typical(target, ids, **rule)
    drawn = verify_typical(target, ids, **rule, correction="sample", keys=keys)
    assert torch.equal(argmax.num_accepted, drawn.num_accepted)
    compared = 0
    for row, at in enumerate(drawn.num_accepted.tolist()):
        compared += assert_decided(
            argmax, row, oracle.accept_typical(target[row], ids[row].tolist(), 0.2, 0.4, epsilon)
        )
        keys_there = keys.rows(torch.tensor([row]))
        keys_there = keys_there._replace(positions=keys_there.positions + at)
        decision = oracle.draw(target[row, at].double(), keys_there, Stream.CORRECTION)
        assert decision.margin < BORDER or decision.token_ids == [int(drawn.token_ids[row, at])]
    assert compared > 0.9 * NUM_ROWS
