"""The kernels' distributions on a GPU; in the interpreter, where a trial takes 0.1 s, they decide as the twins do."""

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
from tests.triton_kernels.on_triton import DEVICE, on_triton
from tests.triton_kernels.operations import OPERATIONS

NUM_TRIALS = 40_960
draw = partial(on_triton, sample)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_joint_distribution_of_a_round_is_exact_on_a_gpu(name: str) -> None:
    logits = rank_reversed_logits(3, 2)
    assert round_p_value(name, *logits, NUM_TRIALS, partial(on_triton, OPERATIONS[name]), draw=draw) > PASS_P_VALUE


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_first_token_has_the_targets_distribution_on_a_gpu(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    target = 3 * torch.randn(3, 4096, generator=generator)
    draft = target[:2] + torch.randn(2, 4096, generator=generator)
    keys, rows = make_keys(NUM_TRIALS, seed=7), (NUM_TRIALS, -1, -1)
    ids = draw_drafts(draft.to(DEVICE), keys, EXACT[name][1], draw)
    verdict = on_triton(OPERATIONS[name], target.to(DEVICE).expand(*rows), ids, draft.to(DEVICE).expand(*rows), keys)
    counts = torch.bincount(verdict.token_ids[:, 0], minlength=4096)
    assert p_value(counts, target[0].double().softmax(-1)) > PASS_P_VALUE
