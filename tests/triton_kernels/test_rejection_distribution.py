"""Rejection sampling keeps the target's law, jointly over everything that one round emits."""

import pytest
from torch import Tensor

from hf_speculate.triton_kernels import NoiseKeys, Verdict, verify_rejection
from tests.triton_kernels.distributions import FAIL_P_VALUE, PASS_P_VALUE, rank_reversed_laws, rejection_p_value

NUM_TRIALS = 1_000_000
# A quarter is enough for a control: each fails by many more orders of magnitude than are asked.
NUM_CONTROL_TRIALS = 250_000


def verify(target_logits: Tensor, ids: Tensor, draft_logits: Tensor, keys: NoiseKeys) -> Verdict:
    return verify_rejection(target_logits, ids, draft_logits, keys=keys)


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "num_draft_tokens"), [(3, 5), (8, 4), (16, 3), (64, 2)])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_joint_law_of_a_round_is_exact_over_many_trials(vocab_size: int, num_draft_tokens: int, spread: float) -> None:
    target, draft = rank_reversed_laws(vocab_size, num_draft_tokens, seed=1)
    assert rejection_p_value(target * spread, draft * spread, 8 * NUM_TRIALS, verify) > PASS_P_VALUE


def test_the_joint_law_is_exact_and_another_proposal_than_the_one_drawn_from_is_caught() -> None:
    def with_wrong_draft(target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys) -> Verdict:
        return verify(target, ids, draft / 1.5, keys)

    laws = rank_reversed_laws(16, 2)
    assert rejection_p_value(*laws, NUM_CONTROL_TRIALS, verify) > PASS_P_VALUE
    assert rejection_p_value(*laws, NUM_CONTROL_TRIALS, with_wrong_draft) < FAIL_P_VALUE
