"""The vectorised twins decide as plain loops in float64 do, with the same noise."""

from collections.abc import Callable

import pytest
import torch

from hf_speculate.triton_kernels import Stream, Verdict, sample, verify_typical
from tests.triton_kernels import oracle
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.operations import OPERATIONS, make_contested_round

# Float32 logits near 10 carry errors of 1e-6 into a log-probability; closer decisions may go either way.
BORDER = 1e-5
NUM_ROWS, NUM_DRAFT_TOKENS = 150, 4


def assert_decided(verdict: Verdict, decisions: list[oracle.Decision]) -> None:
    """Compare all rows but those that were decided at the border."""
    for row, decision in enumerate(decisions):
        if decision.margin >= BORDER:
            padding = [-1] * (NUM_DRAFT_TOKENS + 1 - len(decision.token_ids))
            assert verdict.token_ids[row].tolist() == decision.token_ids + padding
            assert int(verdict.num_accepted[row]) == len(decision.token_ids) - 1
            assert int(verdict.status[row]) == 0
    assert sum(decision.margin >= BORDER for decision in decisions) > 0.9 * NUM_ROWS


# What decides one row of target, ids and draft by its keys.
DECIDERS: dict[str, Callable[..., oracle.Decision]] = {
    "rejection": oracle.reject,
    "point mass": lambda target, ids, _, keys: oracle.reject(target, ids, None, keys),
    "block": oracle.verify_block,
}


@pytest.mark.parametrize("vocab_size", [2, 37, 500])
@pytest.mark.parametrize(
    ("name", "distance"), [("rejection", 0.7), ("point mass", 0.7), ("block", 0.1), ("block", 0.7), ("block", 3.0)]
)
def test_verifiers_decide_as_float64_does(name: str, distance: float, vocab_size: int) -> None:
    round_ = make_contested_round(NUM_ROWS, NUM_DRAFT_TOKENS, vocab_size, distance=distance)
    keys = make_keys(NUM_ROWS, seed=5, rounds=4, positions=99)
    verdict, decisions = OPERATIONS[name](*round_, keys), []
    for row, (target, ids, draft) in enumerate(zip(*round_, strict=True)):
        decisions.append(DECIDERS[name](target, ids.tolist(), draft, keys.rows(torch.tensor([row]))))
    assert_decided(verdict, decisions)


@pytest.mark.parametrize("vocab_size", [2, 37, 500])
@pytest.mark.parametrize("epsilon", [0.0, 1e-5])
def test_typical_is_the_rule_of_the_paper_and_draws_its_correction_from_the_target(
    vocab_size: int, epsilon: float
) -> None:
    target, ids, _ = make_contested_round(NUM_ROWS, NUM_DRAFT_TOKENS, vocab_size)
    rule = {"posterior_threshold": 0.2, "posterior_alpha": 0.4, "entropy_epsilon": epsilon}
    keys = make_keys(NUM_ROWS, seed=2)
    argmax = verify_typical(target, ids, **rule)
    rows = zip(target, ids.tolist(), strict=True)
    assert_decided(argmax, [oracle.accept_typical(logits, row_ids, 0.2, 0.4, epsilon) for logits, row_ids in rows])
    drawn = verify_typical(target, ids, **rule, correction="sample", keys=keys)
    at = drawn.num_accepted.long()
    assert torch.equal(at, argmax.num_accepted.long())
    keys_there = keys._replace(positions=keys.positions + at)
    alone = sample(target[torch.arange(NUM_ROWS), at], keys=keys_there, stream=Stream.CORRECTION)
    assert torch.equal(drawn.token_ids.gather(1, at[:, None])[:, 0], alone.token_ids)
