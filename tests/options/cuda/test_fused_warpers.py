"""Test fused warpers: temperature, top-k, top-p and min-p in one kernel."""

from typing import Any

import pytest
import torch

from hf_speculate.kernels import warp_logits
from hf_speculate.options.cuda.fused_warpers import fuse_warpers
from hf_speculate.processors import BlockLogitsProcessorList
from tests.processors.test_processors import (
    FILLS_K,
    HEAT,
    KEEPS_3,
    MIN_P,
    PENALTY,
    SUBCLASSED,
    TOP_K,
    TOP_P,
    TYPICAL,
)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            [HEAT, TOP_K, TOP_P, MIN_P],
            [{"temperature": 0.7, "top_k": 7, "top_p": 0.8, "min_p": 0.05}],
        ),
        # Not in the usual order.
        ([TOP_P, HEAT, TOP_K], [{"top_p": 0.8}, {"temperature": 0.7, "top_k": 7}]),
        ([PENALTY, TOP_K, TYPICAL, TOP_P], [PENALTY, {"top_k": 7}, TYPICAL, {"top_p": 0.8}]),
        ([SUBCLASSED, KEEPS_3, FILLS_K], [SUBCLASSED, KEEPS_3, FILLS_K]),
    ],
)
def test_warpers_in_the_usual_order_are_fused(given: list[Any], wanted: list[Any]) -> None:
    assert [getattr(entry, "arguments", entry) for entry in fuse_warpers(given)] == wanted


def test_fused_warper_reads_scores_of_any_dtype_and_no_text() -> None:
    fused, scores = (
        BlockLogitsProcessorList(fuse_warpers([HEAT, TOP_K], "torch")),
        torch.randn(2, 1, 64).bfloat16(),
    )
    warped = fused(torch.zeros(2, 0, dtype=torch.int64), scores)
    assert torch.equal(
        warped[:, 0], warp_logits(scores[:, 0], temperature=0.7, top_k=7, backend="torch")
    )
    assert not fused.reads_token_ids
    assert BlockLogitsProcessorList([*fused, PENALTY]).reads_token_ids
