"""The kernels' own laws. In the interpreter a trial takes a tenth of a second, so few trials and laws far apart."""

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import NoiseKeys, Stream, Verdict, row_seeds, sample
from tests.triton_kernels.distributions import (
    PASS_P_VALUE,
    block_law,
    count_cells,
    coupled_law,
    p_value,
    rank_reversed_laws,
    rejection_law,
)
from tests.triton_kernels.on_triton import DEVICE, on_triton, verify_on_triton

pytest.importorskip("triton", reason="needs Triton")

VOCAB_SIZE = 3
NUM_TRIALS = 150  # a wrong proposal law needs fewer than a hundred
NUM_GPU_TRIALS = 40_960
LAWS = {"rejection": rejection_law, "block": block_law, "coupled": coupled_law}


def draw(name: str, target: Tensor, draft: Tensor, num_trials: int) -> Verdict:
    """Verdicts of trials whose drafts the kernels drew from `draft` [K, V]."""
    seeds = row_seeds(7, num_trials)
    keys = NoiseKeys(seeds, torch.full_like(seeds, 3), torch.full_like(seeds, 17))
    stream = Stream.RACE if name == "coupled" else Stream.DRAFT
    ids = [
        on_triton(
            sample, law.expand(num_trials, -1), keys=keys._replace(positions=keys.positions + place), stream=stream
        ).token_ids
        for place, law in enumerate(draft)
    ]
    rows = (num_trials, -1, -1)
    return verify_on_triton(name, target.expand(*rows), torch.stack(ids, dim=1), draft.expand(*rows), keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rejection", "block", "coupled"])
def test_joint_law_of_a_round_is_exact(name: str) -> None:
    target, draft = rank_reversed_laws(VOCAB_SIZE, 2 if name == "block" else 1)
    counts = count_cells(draw(name, target, draft, NUM_TRIALS), VOCAB_SIZE)
    assert p_value(counts, LAWS[name](target, draft)) > PASS_P_VALUE


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAWS)
def test_joint_law_of_a_round_is_exact_on_a_gpu(name: str) -> None:
    target, draft = rank_reversed_laws(VOCAB_SIZE, 2)
    counts = count_cells(draw(name, target, draft, NUM_GPU_TRIALS), VOCAB_SIZE)
    assert p_value(counts, LAWS[name](target, draft)) > PASS_P_VALUE


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAWS)
def test_first_token_law_is_the_target_on_a_gpu(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    target = 3 * torch.randn(3, 4096, generator=generator)
    draft = target[:2] + torch.randn(2, 4096, generator=generator)
    verdict = draw(name, target.to(DEVICE), draft.to(DEVICE), NUM_GPU_TRIALS)
    counts = torch.bincount(verdict.token_ids[:, 0], minlength=4096)
    assert p_value(counts, target[0].double().softmax(-1)) > PASS_P_VALUE
