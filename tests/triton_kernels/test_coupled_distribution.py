"""Coupled verification emits what the target draws itself, whatever was drafted, and keeps nearly all it could."""

import pytest
import torch

from hf_speculate.triton_kernels import Stream, sample
from tests.triton_kernels.distributions import (
    PASS_P_VALUE,
    acceptance_law,
    count_rounds,
    coupled_law,
    make_keys,
    p_value,
    rank_reversed_laws,
)
from tests.triton_kernels.operations import OPERATIONS, make_round, warp_of

NUM_TRIALS = 1_000_000
# A quarter is enough for a control: each fails by many more orders of magnitude than are asked.
NUM_CONTROL_TRIALS = 250_000
NUM_SIGMAS = 4.0
# Rounding of sums of float64 probabilities.
EXACT = 1e-12

verify = OPERATIONS["coupled"]


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "num_draft_tokens"), [(3, 3), (8, 3), (16, 2)])
def test_joint_law_of_a_round_is_exact_for_a_raced_rank_reversed_draft(vocab_size: int, num_draft_tokens: int) -> None:
    target, draft = rank_reversed_laws(vocab_size, num_draft_tokens)
    counts = count_rounds(target, draft, NUM_TRIALS, verify, Stream.RACE)
    assert p_value(counts, coupled_law(target, draft)) > PASS_P_VALUE


@pytest.mark.parametrize("name", ["coupled", "coupled, warped"])
@pytest.mark.parametrize("vocab_size", [3, 500, 20_000])
def test_every_emitted_token_is_the_one_that_sample_races_for(name: str, vocab_size: int) -> None:
    target, _, draft = make_round(60, 3, vocab_size)
    keys = make_keys(60, seed=8, positions=31)
    warp = warp_of(target, keys) if name.endswith("warped") else {}
    raced = []
    for position in range(4):
        row_warp = warp | ({"row_cutoffs": warp["row_cutoffs"][:, position]} if warp else {})
        keys_there = keys._replace(rounds=keys.rounds + 5, positions=keys.positions + position)
        raced.append(sample(target[:, position], keys=keys_there, stream=Stream.RACE, **row_warp).token_ids)
    plain = torch.stack(raced, dim=-1)  # [B, K+1]
    for ids in (draft.argmax(-1), plain[:, :-1], torch.full_like(plain[:, :-1], -1)):
        verdict = OPERATIONS[name](target, ids, draft, keys)
        emitted = torch.arange(4) <= verdict.num_accepted.unsqueeze(-1)
        assert torch.equal(verdict.token_ids, torch.where(emitted, plain, -1))
        agrees = (ids == plain[:, :-1]).long().cumprod(-1).sum(-1)
        assert torch.equal(verdict.num_accepted.long(), agrees)


@pytest.mark.parametrize(("vocab_size", "distance"), [(8, 0.1), (64, 0.5), (8, 2.0), (64, None)])
def test_a_raced_draft_is_kept_nearly_as_often_as_any_could_be(vocab_size: int, distance: float | None) -> None:
    target, draft = rank_reversed_laws(vocab_size, 1)
    if distance is not None:
        draft = target[:-1] + distance * torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(1))
    optimum = float(torch.minimum(target[:-1].double().softmax(-1), draft.double().softmax(-1)).sum())
    law = coupled_law(target, draft)
    accepted = float(acceptance_law(law, vocab_size)[1])
    # Daliri et al., arXiv:2408.07978: at least (1 - TV) / (1 + TV), with TV = 1 - optimum.
    assert optimum / (2 - optimum) - EXACT <= accepted <= optimum + EXACT
    counts = count_rounds(target, draft, NUM_CONTROL_TRIALS, verify, Stream.RACE)
    measured = float(acceptance_law(counts, vocab_size)[1]) / NUM_CONTROL_TRIALS
    assert abs(measured - accepted) < NUM_SIGMAS * (accepted * (1 - accepted) / NUM_CONTROL_TRIALS) ** 0.5
