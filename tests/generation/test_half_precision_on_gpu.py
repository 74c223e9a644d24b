"""Test `generate()` in half precision on a CUDA device, eager and compiled."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_speculate
from tests.support.tiny import make_model, noisy_copy, ragged_prompts

pytestmark = pytest.mark.gpu

K = 5
HALF = (torch.bfloat16, torch.float16)
EAGER: dict[str, Any] = {"speculation_graphs": "off"}
COMPILED: dict[bool, dict[str, Any]] = {
    False: EAGER,
    True: {**EAGER, "cache_implementation": "static"},
}
GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "lookup": {"prompt_lookup_num_tokens": K},
    "processors": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "dynamic": {"speculation_cache": "dynamic"},
    "graphs": {"speculation_graphs": "on"},
}


@cache
def pair(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = make_model("llama", dtype=dtype)
    draft = noisy_copy(target)
    return hf_speculate.enable(target.to("cuda:0")), draft.to("cuda:0")


def prompts(batch_size: int) -> dict[str, Tensor]:
    inputs = ragged_prompts(batch_size, seed=4, min_len=8, max_len=24)
    return {name: value.to("cuda:0") for name, value in inputs.items()}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize(
    ("is_compiled", "family"),
    [*((False, family) for family in GREEDY), (True, "plain"), (True, "lookup")],
)
def test_greedy_tokens_equal_plain_except_for_ties(
    dtype: torch.dtype, batch_size: int, is_compiled: bool, family: str
) -> None:
    target, draft = pair(dtype)
    assistant = None if family == "lookup" else draft
    options = {**COMPILED[is_compiled], **GREEDY[family], "max_new_tokens": 40}
    report = hf_speculate.check_parity(target, assistant, [prompts(batch_size)], **options)
    assert report.ok, report


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("is_compiled", COMPILED)
@pytest.mark.parametrize("verifier", ["rejection", "block", "coupled", "typical"])
def test_sampling_is_a_function_of_the_seed(
    dtype: torch.dtype, batch_size: int, is_compiled: bool, verifier: str
) -> None:
    target, draft = pair(dtype)
    stats = hf_speculate.SpeculationStats()
    options: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 20,
        "do_sample": True,
        "verifier": verifier,
    }
    options |= {
        "assistant_model": draft,
        "num_assistant_tokens": K,
        "max_new_tokens": 40,
        "speculation_stats": stats,
    }
    options |= {**prompts(batch_size), **COMPILED[is_compiled]}
    first, again, third = (target.generate(**options, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, third)
    assert 0 <= int(first.min()) <= int(first.max()) < target.config.vocab_size
    assert stats.num_accepted > 0
