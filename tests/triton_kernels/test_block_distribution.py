"""Block verification keeps the target's law, jointly over a round and over several, and keeps more than rejection."""

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import NoiseKeys, Verdict
from tests.triton_kernels.distributions import (
    FAIL_P_VALUE,
    PASS_P_VALUE,
    acceptance_law,
    block_law,
    block_p_value,
    count_rounds,
    rank_reversed_laws,
    rejection_law,
)
from tests.triton_kernels.operations import OPERATIONS
from tests.triton_kernels.tables import text_p_value

NUM_TRIALS = 1_000_000
# A quarter is enough for a control: each fails by many more orders of magnitude than are asked.
NUM_CONTROL_TRIALS = 250_000
NUM_TEXTS = 400_000
NUM_SIGMAS = 4.0
# Sums of a thousand float64 products.
EXACT = 1e-12

verify = OPERATIONS["block"]


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "num_draft_tokens"), [(3, 6), (8, 3), (16, 3)])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_joint_law_of_a_round_is_exact_over_many_trials(vocab_size: int, num_draft_tokens: int, spread: float) -> None:
    target, draft = rank_reversed_laws(vocab_size, num_draft_tokens, seed=1)
    assert block_p_value(target * spread, draft * spread, 8 * NUM_TRIALS, verify) > PASS_P_VALUE


@pytest.mark.parametrize(("vocab_size", "num_draft_tokens"), [(3, 3), (8, 3), (16, 2)])
def test_the_enumerated_law_is_the_targets_once_the_target_goes_on(vocab_size: int, num_draft_tokens: int) -> None:
    target, draft = rank_reversed_laws(vocab_size, num_draft_tokens)
    probs = target.double().softmax(-1)
    sizes = [vocab_size ** (kept + 1) for kept in range(num_draft_tokens + 1)]
    whole = torch.zeros(sizes[-1], dtype=torch.float64)
    expected = torch.ones(1, dtype=torch.float64)
    for kept, block in enumerate(block_law(target, draft).split(sizes)):
        for position in range(kept + 1, num_draft_tokens + 1):
            block = (probs[position].unsqueeze(-1) * block).flatten()
        whole += block
        expected = (probs[kept].unsqueeze(-1) * expected).flatten()
    torch.testing.assert_close(whole, expected, atol=EXACT, rtol=0)


@pytest.mark.slow
def test_more_tokens_are_kept_than_by_rejection_and_as_many_as_enumerated() -> None:
    for vocab_size, num_draft_tokens in [(3, 3), (8, 3), (16, 2)]:
        target, draft = rank_reversed_laws(vocab_size, num_draft_tokens)
        kept = torch.arange(num_draft_tokens + 1).double()
        law = acceptance_law(block_law(target, draft), vocab_size)
        by_rejection = acceptance_law(rejection_law(target, draft), vocab_size)
        assert (kept @ law) > (kept @ by_rejection) + EXACT
        # At least n tokens are kept at least as often, for every n.
        assert (law.flip(0).cumsum(0) >= by_rejection.flip(0).cumsum(0) - EXACT).all()
        counts = acceptance_law(count_rounds(target, draft, NUM_CONTROL_TRIALS, verify), vocab_size)
        mean, exact = float(kept @ counts / NUM_CONTROL_TRIALS), float(kept @ law)
        variance = float(kept.square() @ law) - exact**2
        assert abs(mean - exact) < NUM_SIGMAS * (variance / NUM_CONTROL_TRIALS) ** 0.5
        rejected = acceptance_law(count_rounds(target, draft, NUM_CONTROL_TRIALS, OPERATIONS["rejection"]), vocab_size)
        assert mean > float(kept @ rejected / NUM_CONTROL_TRIALS)


@pytest.mark.parametrize("end_token_id", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_joint_law_of_four_tokens_over_several_rounds_is_the_targets(end_token_id: int | None) -> None:
    assert text_p_value(verify, NUM_TEXTS, end_token_id=end_token_id) > PASS_P_VALUE


@pytest.mark.slow
def test_control_keys_without_the_round_are_caught() -> None:
    assert text_p_value(verify, NUM_TEXTS, with_rounds=False) < FAIL_P_VALUE


def test_control_a_proposal_other_than_the_one_drawn_from_is_caught() -> None:
    def control(target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys) -> Verdict:
        return verify(target, ids, draft / 1.5, keys)

    assert block_p_value(*rank_reversed_laws(16, 2), NUM_CONTROL_TRIALS, control) < FAIL_P_VALUE
