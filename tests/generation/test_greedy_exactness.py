"""Greedy output equals plain `generate` on the same padded batch, token for token, in float64."""

import pytest
import torch

import hf_speculate
from tests.cases import CACHES, assert_decodes_as_plain, assert_equal_ids, pair
from tests.tiny import KINDS, SLIDING_WINDOW, make_model, noisy_copy, ragged_prompts

NUM_NEW = 3 * SLIDING_WINDOW  # past the window of the models that have one
NUM_ASSISTANT_TOKENS = (1, 3, 5, 8)
NUM_SLOW_SEQUENCES = 2000


@pytest.mark.parametrize("cache", CACHES)
def test_a_draft_of_another_dtype_drafts(cache):
    target, draft = pair("llama")[0], pair("llama", dtype=torch.float32)[1]
    stats = assert_decodes_as_plain(
        target, draft, ragged_prompts(3, seed=3), max_new_tokens=NUM_NEW, speculation_cache=cache
    )
    assert 0 < stats.num_accepted < stats.num_verified


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain_over_the_whole_matrix(kind):
    num_sequences, seed = 0, 0
    wanted = -(-NUM_SLOW_SEQUENCES // len(KINDS))
    while num_sequences < wanted:
        target = hf_speculate.enable(make_model(kind, seed=seed))
        draft = noisy_copy(target, 0.02, seed=seed + 1)
        for batch_size in (1, 2, 3, 8):
            inputs = ragged_prompts(batch_size, seed=seed, max_len=2 * SLIDING_WINDOW)
            plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
            for num in NUM_ASSISTANT_TOKENS:
                ours = target.generate(
                    **inputs, max_new_tokens=NUM_NEW, assistant_model=draft, num_assistant_tokens=num
                )
                assert_equal_ids(plain, ours)
                num_sequences += batch_size
        seed += 1
    assert num_sequences >= wanted


def test_a_confidence_threshold_shortens_drafts_but_not_the_text():
    target, draft = pair("llama")
    inputs = ragged_prompts(2, seed=9)
    sure, unsure = (
        assert_decodes_as_plain(target, draft, inputs, max_new_tokens=NUM_NEW, assistant_confidence_threshold=threshold)
        for threshold in (None, 0.9)
    )
    assert unsure.num_drafted / unsure.num_rounds < sure.num_drafted / sure.num_rounds
