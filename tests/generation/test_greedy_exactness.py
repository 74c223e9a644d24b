"""Greedy output equals plain `generate` on the same padded batch, token for token, in float64."""

import pytest
import torch

import hf_speculate
from tests.cases import ACCEPTED_ALL, ACCEPTED_NONE, CACHES, assert_equal_ids, pair, plain_and_ours
from tests.tiny import KINDS, SLIDING_WINDOW, make_model, noisy_copy, ragged_prompts

NUM_NEW = 3 * SLIDING_WINDOW  # past the window of the models that have one
NUM_ASSISTANT_TOKENS = (1, 3, 5, 8)
NUM_SLOW_SEQUENCES = 2000


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain(kind):
    target, draft = pair(kind)
    inputs = ragged_prompts(3, seed=3)
    stats = hf_speculate.SpeculationStats()
    plain, ours = plain_and_ours(
        target, draft, inputs, max_new_tokens=NUM_NEW, num_assistant_tokens=3, speculation_stats=stats
    )
    assert_equal_ids(plain, ours)
    assert 0 < stats.num_accepted < stats.num_verified


@pytest.mark.parametrize("cache", CACHES)
def test_a_draft_of_another_dtype_drafts(cache):
    target, draft = pair("llama")[0], pair("llama", dtype=torch.float32)[1]
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": NUM_NEW, "speculation_cache": cache}
    plain, ours = plain_and_ours(target, draft, ragged_prompts(3, seed=3), **options, speculation_stats=stats)
    assert_equal_ids(plain, ours)
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


@pytest.mark.parametrize("noise", [ACCEPTED_ALL, ACCEPTED_NONE])
def test_greedy_equals_plain_when_all_or_nothing_is_accepted(noise):
    target, draft = pair("mistral_window", noise)
    stats = hf_speculate.SpeculationStats()
    plain, ours = plain_and_ours(
        target, draft, ragged_prompts(2, seed=4), max_new_tokens=19, num_assistant_tokens=4, speculation_stats=stats
    )
    assert_equal_ids(plain, ours)
    if noise == ACCEPTED_ALL:
        assert stats.verified_acceptance_rate == 1.0
        assert stats.mean_acceptance_length > 4
    else:
        assert stats.verified_acceptance_rate < 0.2


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient"])
def test_heuristic_schedules_change_the_draft_length_but_not_the_text(schedule):
    target, draft = pair("qwen2")
    inputs = ragged_prompts(1, seed=8)
    stats = hf_speculate.SpeculationStats()
    plain = target.generate(**inputs, max_new_tokens=30)
    ours = target.generate(
        **inputs,
        max_new_tokens=30,
        assistant_model=draft,
        num_assistant_tokens=2,
        num_assistant_tokens_schedule=schedule,
        speculation_stats=stats,
    )
    assert_equal_ids(plain, ours)
    assert len(stats.verified_per_position) > 2
    assert draft.generation_config.num_assistant_tokens is None


def test_a_confidence_threshold_shortens_drafts_but_not_the_text():
    target, draft = pair("llama")
    inputs = ragged_prompts(2, seed=9)
    sure, unsure = hf_speculate.SpeculationStats(), hf_speculate.SpeculationStats()
    plain = target.generate(**inputs, max_new_tokens=24)
    for threshold, stats in ((None, sure), (0.9, unsure)):
        ours = target.generate(
            **inputs,
            max_new_tokens=24,
            assistant_model=draft,
            num_assistant_tokens=5,
            assistant_confidence_threshold=threshold,
            speculation_stats=stats,
        )
        assert_equal_ids(plain, ours)
    assert unsure.num_drafted / unsure.num_rounds < sure.num_drafted / sure.num_rounds
