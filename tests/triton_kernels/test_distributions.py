"""Verifiers keep the target's distribution, jointly over everything that one round emits."""

import pytest
import torch

from hf_speculate.triton_kernels import Stream, sample
from tests.triton_kernels.distributions import (
    EXACT,
    FAIL_P_VALUE,
    PASS_P_VALUE,
    make_keys,
    rank_reversed_logits,
    round_p_value,
)
from tests.triton_kernels.operations import OPERATIONS, make_round, warp_of

NUM_TRIALS = 2_000_000
# Enough for a control, which fails by many more orders of magnitude than are asked.
NUM_CONTROL_TRIALS = 250_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "vocab_size", "num_draft_tokens"),
    [("rejection", *sizes) for sizes in ((3, 5), (8, 4), (16, 3), (64, 2))]
    + [("block", *sizes) for sizes in ((3, 6), (8, 3), (16, 3))]
    + [("coupled", *sizes) for sizes in ((3, 3), (16, 2))],
)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_joint_distribution_is_exact_over_many_trials(
    name: str, vocab_size: int, num_draft_tokens: int, spread: float
) -> None:
    logits = [spread * one for one in rank_reversed_logits(vocab_size, num_draft_tokens, seed=1)]
    assert round_p_value(name, *logits, NUM_TRIALS, OPERATIONS[name]) > PASS_P_VALUE


@pytest.mark.parametrize("name", EXACT)
def test_joint_distribution_is_exact_and_drafts_of_another_one_are_noticed(name: str) -> None:
    target, draft = rank_reversed_logits(16, 2)
    rounds = (name, target, draft, NUM_CONTROL_TRIALS, OPERATIONS[name])
    assert round_p_value(*rounds) > PASS_P_VALUE
    assert round_p_value(*rounds, drawn_from=draft / 1.5) < FAIL_P_VALUE


@pytest.mark.parametrize("name", ["greedy", "coupled", "coupled, warped"])
@pytest.mark.parametrize("vocab_size", [3, 20_000])
def test_greedy_and_coupled_verification_emit_the_tokens_of_plain_decoding(name: str, vocab_size: int) -> None:
    target, _, draft = make_round(60, 3, vocab_size)
    keys = make_keys(60, seed=8, positions=31)
    warp = warp_of(target, keys) if name.endswith("warped") else {"row_cutoffs": torch.full((60, 4), -torch.inf)}
    plain = target.argmax(-1)  # [B, K+1]
    for position in range(4) if name != "greedy" else ():
        row_warp = warp | {"row_cutoffs": warp["row_cutoffs"][:, position]}
        keys_there = keys._replace(rounds=keys.rounds + 5, positions=keys.positions + position)
        plain[:, position] = sample(target[:, position], keys=keys_there, stream=Stream.RACE, **row_warp).token_ids
    for ids in (draft.argmax(-1), plain[:, :-1], torch.full_like(plain[:, :-1], -1)):
        verdict = OPERATIONS[name](target, ids, draft, keys)
        agrees = (ids == plain[:, :-1]).long().cumprod(-1).sum(-1)
        assert torch.equal(verdict.num_accepted.long(), agrees)
        emitted = torch.arange(4) <= agrees.unsqueeze(-1)
        assert torch.equal(verdict.token_ids, torch.where(emitted, plain, -1))
