"""Compare the vectorised reference with plain float64 loops over rows, using the same noise."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from hf_speculate.kernels import (
    NoiseKeys,
    Stream,
    Verdict,
    exponentials,
    sample,
    uniforms,
    verify_typical,
)
from tests.kernels.distributions import make_keys
from tests.kernels.operations import OPERATIONS, make_contested_round


class Decision(NamedTuple):
    """Expected result for one row."""

    token_ids: list[int]
    margin: float  # margin of the closest comparison; at 0, the decision flips


def _race(weights: Tensor, keys: NoiseKeys, offset: int) -> tuple[int, float]:
    """Return the winner of one row's race and its relative margin, 0 without a positive weight."""
    clocks = exponentials(
        keys, Stream.CORRECTION, torch.tensor([[offset]]), torch.arange(len(weights))
    )[0].double()
    first, second = (weights / clocks).topk(2)[0].tolist()
    return int((weights / clocks).argmax()), (first - second) / first if first > 0.0 else 0.0


def _coin(keys: NoiseKeys, position: int, token_id: int) -> float:
    return float(
        uniforms(keys, Stream.ACCEPT, torch.tensor([[position]]), torch.tensor([[token_id]]))
    )


def reject(
    target_logits: Tensor, draft_token_ids: list[int], draft_logits: Tensor | None, keys: NoiseKeys
) -> Decision:
    """Verify one row by rejection sampling.

    Args:
        target: [K+1, V].
        draft: [K, V], or a point mass.
        keys: keys of the row.
    """
    margin, target = 1.0, target_logits.double().softmax(-1)
    if draft_logits is None:
        draft = one_hot(torch.tensor(draft_token_ids), target.shape[-1]).double()
    else:
        draft = draft_logits.double().softmax(-1)
    for position, token_id in enumerate(draft_token_ids):
        coin, ratio = (
            _coin(keys, position, token_id),
            float(target[position, token_id] / draft[position, token_id]),
        )
        margin = min(margin, abs(coin - min(ratio, 1.0)) / coin if ratio < 1.0 else ratio - coin)
        if coin >= ratio:
            winner, lead = _race((target[position] - draft[position]).clamp(min=0), keys, position)
            return Decision([*draft_token_ids[:position], winner], min(margin, lead))
    winner, lead = _race(target[-1], keys, len(draft_token_ids))
    return Decision([*draft_token_ids, winner], min(margin, lead))


def verify_block(
    target_logits: Tensor, draft_token_ids: list[int], draft_logits: Tensor, keys: NoiseKeys
) -> Decision:
    """Verify one row by block verification (algorithm 2 of the paper); arguments as in `reject`."""
    target, draft = target_logits.double().softmax(-1), draft_logits.double().softmax(-1)
    num_accepted, margin, ratios = 0, 1.0, [1.0]
    for count, token_id in enumerate(draft_token_ids, start=1):
        ratio = min(
            ratios[-1] * float(target[count - 1, token_id] / draft[count - 1, token_id]), 1.0
        )
        ratios.append(ratio)
        coin, mass = _coin(keys, count - 1, token_id), ratio
        if count < len(draft_token_ids):
            mass = float((ratio * target[count] - draft[count]).clamp(min=0).sum())
        bound = coin * (mass + 1.0 - ratio)
        if ratio < 1.0:  # a ratio of 1 or more is always accepted
            margin = min(margin, abs(bound - mass))
        if ratio == 1.0 or bound < mass:
            num_accepted = count
    weights = target[-1]
    if num_accepted < len(draft_token_ids):
        weights = (ratios[num_accepted] * target[num_accepted] - draft[num_accepted]).clamp(min=0)
    winner, lead = _race(weights, keys, num_accepted)
    return Decision([*draft_token_ids[:num_accepted], winner], min(margin, lead))


def accept_typical(
    target_logits: Tensor,
    draft_token_ids: list[int],
    threshold: float,
    alpha: float,
    epsilon: float,
) -> Decision:
    """Verify one row by typical acceptance, with the argmax as the correction."""
    margin, best = 1.0, target_logits.argmax(-1).tolist()
    for position, token_id in enumerate(draft_token_ids):
        probs = target_logits[position].double().softmax(-1).tolist()
        entropy = -sum(p * math.log(p + epsilon) for p in probs if p > 0)
        bound = min(threshold, alpha * math.exp(-entropy))
        margin = min(margin, abs(probs[token_id] - bound) / bound)
        if probs[token_id] <= bound:
            return Decision([*draft_token_ids[:position], best[position]], margin)
    return Decision([*draft_token_ids, best[-1]], margin)


# Float32 logits near 10 cause errors of 1e-6 in a log-probability, so decisions with a smaller
# margin may differ.
BORDER = 1e-5
NUM_ROWS, NUM_DRAFT_TOKENS = 150, 4


def assert_decided(verdict: Verdict, decisions: list[Decision]) -> None:
    """Compare all rows except those with a margin below the threshold."""
    for row, decision in enumerate(decisions):
        if decision.margin >= BORDER:
            padding = [-1] * (NUM_DRAFT_TOKENS + 1 - len(decision.token_ids))
            assert verdict.token_ids[row].tolist() == decision.token_ids + padding
            assert int(verdict.num_accepted[row]) == len(decision.token_ids) - 1
            assert int(verdict.status[row]) == 0
    assert sum(decision.margin >= BORDER for decision in decisions) > 0.9 * NUM_ROWS


# Oracles by verifier: a function of a row's target, ids, draft and keys.
DECIDERS: dict[str, Callable[..., Decision]] = {
    "rejection": reject,
    "point mass": lambda target, ids, _, keys: reject(target, ids, None, keys),
    "block": verify_block,
}


@pytest.mark.parametrize("vocab_size", [2, 37, 500])
@pytest.mark.parametrize(
    ("name", "distance"),
    [("rejection", 0.7), ("point mass", 0.7), ("block", 0.1), ("block", 0.7), ("block", 3.0)],
)
def test_verifiers_decide_as_in_float64(name: str, distance: float, vocab_size: int) -> None:
    round_ = make_contested_round(NUM_ROWS, NUM_DRAFT_TOKENS, vocab_size, distance=distance)
    keys = make_keys(NUM_ROWS, seed=5, rounds=4, positions=99)
    verdict, decisions = OPERATIONS[name](*round_, keys), []
    for row, (target, ids, draft) in enumerate(zip(*round_, strict=True)):
        decisions.append(
            DECIDERS[name](target, ids.tolist(), draft, keys.rows(torch.tensor([row])))
        )
    assert_decided(verdict, decisions)


@pytest.mark.parametrize("vocab_size", [2, 37, 500])
@pytest.mark.parametrize("epsilon", [0.0, 1e-5])
def test_typical_follows_the_rule_of_the_paper(vocab_size: int, epsilon: float) -> None:
    target, ids, _ = make_contested_round(NUM_ROWS, NUM_DRAFT_TOKENS, vocab_size)
    rule = {"posterior_threshold": 0.2, "posterior_alpha": 0.4, "entropy_epsilon": epsilon}
    keys = make_keys(NUM_ROWS, seed=2)
    argmax = verify_typical(target, ids, **rule)
    rows = zip(target, ids.tolist(), strict=True)
    assert_decided(
        argmax, [accept_typical(logits, row_ids, 0.2, 0.4, epsilon) for logits, row_ids in rows]
    )
    drawn = verify_typical(target, ids, **rule, correction="sample", keys=keys)
    at = drawn.num_accepted.long()
    assert torch.equal(at, argmax.num_accepted.long())
    keys_there = keys._replace(positions=keys.positions + at)
    alone = sample(target[torch.arange(NUM_ROWS), at], keys=keys_there, stream=Stream.CORRECTION)
    assert torch.equal(drawn.token_ids.gather(1, at[:, None])[:, 0], alone.token_ids)
