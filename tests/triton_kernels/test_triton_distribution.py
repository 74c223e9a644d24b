"""The kernels' distributions. In the interpreter a trial takes a tenth of a second, so trials are few there."""

from functools import partial

import pytest
import torch

from hf_speculate.triton_kernels import sample
from tests.triton_kernels.distributions import (
    EXACT,
    PASS_P_VALUE,
    draw_drafts,
    make_keys,
    p_value,
    rank_reversed_logits,
    round_p_value,
)
from tests.triton_kernels.on_triton import DEVICE, on_triton, verify_on_triton

pytest.importorskip("triton", reason="needs Triton")

NUM_TRIALS = 150  # drafts of another distribution need fewer than a hundred
NUM_GPU_TRIALS = 40_960
draw = partial(on_triton, sample)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_joint_distribution_of_a_round_is_exact(name: str) -> None:
    logits = rank_reversed_logits(3, 2 if name == "block" else 1)
    assert round_p_value(name, *logits, NUM_TRIALS, partial(verify_on_triton, name), draw=draw) > PASS_P_VALUE


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_joint_distribution_of_a_round_is_exact_on_a_gpu(name: str) -> None:
    logits = rank_reversed_logits(3, 2)
    assert round_p_value(name, *logits, NUM_GPU_TRIALS, partial(verify_on_triton, name), draw=draw) > PASS_P_VALUE


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_first_token_has_the_targets_distribution_on_a_gpu(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    target = 3 * torch.randn(3, 4096, generator=generator)
    draft = target[:2] + torch.randn(2, 4096, generator=generator)
    keys, rows = make_keys(NUM_GPU_TRIALS, seed=7), (NUM_GPU_TRIALS, -1, -1)
    ids = draw_drafts(draft.to(DEVICE), keys, EXACT[name][1], draw)
    verdict = verify_on_triton(name, target.to(DEVICE).expand(*rows), ids, draft.to(DEVICE).expand(*rows), keys)
    counts = torch.bincount(verdict.token_ids[:, 0], minlength=4096)
    assert p_value(counts, target[0].double().softmax(-1)) > PASS_P_VALUE
