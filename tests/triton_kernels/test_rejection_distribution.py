"""Rejection sampling keeps the target's law, jointly over everything that one round emits."""

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import NoiseKeys, Verdict, verify_rejection
from hf_speculate.triton_kernels.reference import rejection as twin
from tests.triton_kernels.controls import CONTROLS
from tests.triton_kernels.distributions import (
    FAIL_P_VALUE,
    PASS_P_VALUE,
    chunks,
    count_cells,
    draw_drafts,
    joint_law,
    p_value,
    rank_reversed_laws,
    rejection_p_value,
)
from tests.triton_kernels.operations import OPERATIONS
from tests.triton_kernels.tables import count_texts, decode, make_tables, text_law

NUM_TRIALS = 1_000_000
# A quarter is enough for a control: each fails by many more orders of magnitude than are asked.
NUM_CONTROL_TRIALS = 250_000
NUM_SIGMAS = 4.0


def verify(target_logits: Tensor, ids: Tensor, draft_logits: Tensor, keys: NoiseKeys) -> Verdict:
    return verify_rejection(target_logits, ids, draft_logits, keys=keys)


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "num_draft_tokens"), [(8, 3), (16, 2), (64, 1)])
def test_joint_law_of_a_round_is_exact_for_a_rank_reversed_draft(vocab_size: int, num_draft_tokens: int) -> None:
    target, draft = rank_reversed_laws(vocab_size, num_draft_tokens)
    assert rejection_p_value(target, draft, NUM_TRIALS, verify) > PASS_P_VALUE


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "num_draft_tokens"), [(3, 5), (8, 4), (16, 3), (64, 2)])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_joint_law_of_a_round_is_exact_over_many_trials(vocab_size: int, num_draft_tokens: int, spread: float) -> None:
    target, draft = rank_reversed_laws(vocab_size, num_draft_tokens, seed=1)
    assert rejection_p_value(target * spread, draft * spread, 8 * NUM_TRIALS, verify) > PASS_P_VALUE


def test_every_position_accepts_with_the_overlap_of_both_laws() -> None:
    target, draft = rank_reversed_laws(16, 4)
    overlaps = torch.minimum(target[:-1].double().softmax(-1), draft.double().softmax(-1)).sum(-1)
    num_accepted = torch.cat(
        [
            verify_rejection(
                target.expand(keys.seeds.shape[0], -1, -1),
                draw_drafts(draft, keys),
                draft.expand(keys.seeds.shape[0], -1, -1),
                keys=keys,
            ).num_accepted
            for keys in chunks(NUM_CONTROL_TRIALS)
        ]
    )
    for position, overlap in enumerate(overlaps.tolist()):
        reached = int((num_accepted >= position).sum())
        accepted = int((num_accepted > position).sum())
        sigma = (reached * overlap * (1 - overlap)) ** 0.5
        assert abs(accepted - reached * overlap) < NUM_SIGMAS * sigma


def test_joint_law_of_four_tokens_over_several_rounds_is_the_targets() -> None:
    target, draft = make_tables(3, 4 + 3)
    counts = torch.zeros(81, dtype=torch.int64)
    for keys in chunks(NUM_CONTROL_TRIALS):
        texts = decode(target, draft, keys.seeds, OPERATIONS["rejection"], length=4, num_draft_tokens=3)
        counts += count_texts(texts, 3, 4)
    assert p_value(counts, text_law(target, 4)) > PASS_P_VALUE


def test_point_mass_keeps_the_target_law_whatever_is_proposed() -> None:
    target, _ = rank_reversed_laws(16, 2)
    proposed = torch.tensor([3, 9])
    probs = target.double().softmax(-1)
    accept = torch.zeros(2, 16, dtype=torch.float64)
    accept[torch.arange(2), proposed] = probs[torch.arange(2), proposed]
    reject = probs.clone()
    reject[torch.arange(2), proposed] = 0.0
    counts = torch.zeros((), dtype=torch.int64)
    for keys in chunks(NUM_TRIALS):
        num_rows = keys.seeds.shape[0]
        verdict = verify_rejection(target.expand(num_rows, -1, -1), proposed.expand(num_rows, -1), keys=keys)
        counts = counts + count_cells(verdict, 16)
    assert p_value(counts, joint_law(accept, reject)) > PASS_P_VALUE


def test_control_a_proposal_other_than_the_one_drawn_from_is_caught() -> None:
    target, draft = rank_reversed_laws(16, 2)

    def with_wrong_draft(target_logits: Tensor, ids: Tensor, draft_logits: Tensor, keys: NoiseKeys) -> Verdict:
        return verify_rejection(target_logits, ids, draft_logits / 1.5, keys=keys)

    assert rejection_p_value(target, draft, NUM_CONTROL_TRIALS, with_wrong_draft) < FAIL_P_VALUE


@pytest.mark.parametrize("name", CONTROLS)
def test_control_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CONTROLS[name](monkeypatch, twin)
    assert rejection_p_value(*rank_reversed_laws(16, 2), NUM_CONTROL_TRIALS, verify) < FAIL_P_VALUE
