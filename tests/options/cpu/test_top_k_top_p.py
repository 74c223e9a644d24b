"""Test top-p after top-k on a CPU, where only the remaining scores are sorted."""

import pytest
import torch
import transformers

from hf_speculate.options.cpu.top_k_top_p import apply_cutoff
from tests.processors.test_processors import assert_same_bits


@pytest.mark.parametrize("seed", range(8))
def test_top_p_after_top_k_rounds_as_transformers(seed: int) -> None:
    scores = torch.randn(1, 9001, generator=torch.Generator().manual_seed(seed))
    scores = transformers.TopKLogitsWarper(5)(None, scores)
    # The probabilities add up exactly to the mass that top-p may drop.
    for num_dropped in range(1, 5):
        dropped = scores.sort().values.softmax(-1).cumsum(-1)[0, num_dropped - 6].item()
        top_p = transformers.TopPLogitsWarper(1 - dropped)
        assert_same_bits(apply_cutoff(top_p, scores), top_p(None, scores))
