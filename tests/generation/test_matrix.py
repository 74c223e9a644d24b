"""Every drafter with every verifier on every cache: the whole matrix of `tests/cases.py`."""

import pytest
import torch

import hf_speculate
from tests.cases import CACHES, DRAFTERS, VERIFIERS, assert_equal_ids, pair
from tests.tiny import ragged_prompts

NUM_NEW = 12
NUM_COPYING = 60  # a random model's text seldom repeats itself
VOCAB_SIZE = 64


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_call_repeats_by_seed_and_row_and_is_plain_where_it_must_be(drafter, verifier, cache):
    target, draft = pair("llama")
    inputs = ragged_prompts(3, seed=40)
    num_new = NUM_COPYING if drafter == "copying" else NUM_NEW
    stats = hf_speculate.SpeculationStats()
    options = {
        **VERIFIERS[verifier],
        "speculation_cache": cache,
        "assistant_model": draft,
        "max_new_tokens": num_new,
        "num_assistant_tokens": 3,
        **DRAFTERS[drafter],
    }
    ours = target.generate(**inputs, **options, seed=[1, 2, 3], speculation_stats=stats)
    assert ours.shape[1] == inputs["input_ids"].shape[1] + num_new
    assert 0 <= ours.min() <= ours.max() < VOCAB_SIZE
    assert 0 < stats.num_accepted <= stats.num_verified <= stats.num_drafted
    alone = target.generate(inputs["input_ids"][2:][:, inputs["attention_mask"][2].bool()], **options, seed=3)
    assert torch.equal(ours[2, -num_new:], alone[0, -num_new:])
    if verifier == "greedy":
        assert_equal_ids(target.generate(**inputs, max_new_tokens=num_new), ours)
    if verifier == "coupled":
        plain = target.generate(**inputs, **VERIFIERS[verifier], seed=[1, 2, 3], max_new_tokens=num_new)
        assert_equal_ids(plain, ours)
