"""Runs of warpers become one operation; whatever else a list holds stays where it stands."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.fused_warpers import fuse_warpers
from hf_speculate.triton_kernels import warp_logits

HEAT, TOP_K, TOP_P = TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.9)
MIN_P, PENALTY, TYPICAL = MinPLogitsWarper(0.1), RepetitionPenaltyLogitsProcessor(1.3), TypicalLogitsWarper(0.9)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([PENALTY, HEAT, TOP_K, TOP_P, MIN_P], [PENALTY, {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}]),
        ([TOP_P, HEAT, TOP_K], [{"top_p": 0.9}, {"temperature": 0.7, "top_k": 5}]),  # not in the usual order
        ([TOP_K, TYPICAL, TOP_P], [{"top_k": 5}, TYPICAL, {"top_p": 0.9}]),
    ],
)
def test_runs_in_the_usual_order_are_joined(given, wanted):
    assert [getattr(one, "arguments", one) for one in fuse_warpers(given)] == wanted


def test_a_warper_with_a_mind_of_its_own_stays():
    others = [
        type("Subclass", (TopKLogitsWarper,), {})(5),
        TopPLogitsWarper(0.9, min_tokens_to_keep=2),
        TopKLogitsWarper(5, filter_value=-1e4),
    ]
    assert fuse_warpers(others) == others


def test_the_list_hands_it_scores_as_they_come_and_reads_no_text():
    fused = BlockLogitsProcessorList(fuse_warpers([HEAT, TOP_K], "torch"))
    scores = torch.randn(2, 1, 64).to(torch.bfloat16)
    warped = fused(torch.zeros(2, 0, dtype=torch.int64), scores)
    assert torch.equal(warped[:, 0], warp_logits(scores[:, 0], temperature=0.7, top_k=5, backend="torch"))
    assert not fused.reads_token_ids
    assert BlockLogitsProcessorList([*fused, PENALTY]).reads_token_ids
