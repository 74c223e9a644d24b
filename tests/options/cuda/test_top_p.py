"""Compare top-p on a GPU with transformers' class."""

import pytest
import torch
from transformers import TopPLogitsWarper

from hf_speculate.options.cuda.top_p import apply_cutoff
from tests.processors.test_processors import assert_same_bits


@pytest.mark.parametrize("top_p", [0.1, 0.9, 1.0])
def test_rows_of_every_kind_are_cut_as_in_transformers(top_p: float) -> None:
    scores = torch.randn(7, 3000, generator=torch.Generator().manual_seed(1))
    scores[1] = -torch.inf
    scores[2, 5], scores[3, 5] = torch.nan, torch.inf
    scores[4, 5] = 60.0  # outweighs all other tokens
    scores[5] = 0.0
    processor = TopPLogitsWarper(top_p, filter_value=-7.0)
    assert_same_bits(apply_cutoff(processor, scores), processor(None, scores))


def test_top_p_dropping_the_best_token_stays_in_transformers() -> None:
    for processor in (TopPLogitsWarper(0.05), TopPLogitsWarper(0.9, min_tokens_to_keep=2)):
        assert apply_cutoff(processor, torch.zeros(1, 3)) is None
