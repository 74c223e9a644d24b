"""Prompt lookup inside `generate()`, alone and beside a draft model: plain text, exact distribution, drafted tokens."""

import pytest
import torch
from transformers import GenerationConfig

import hf_speculate
from hf_speculate import SpeculationStats, SuffixStore
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value, pair
from tests.generation.test_distribution import SIGNIFICANCE, draw, joint_distribution, p_value
from tests.reliability.faults import Fault, FaultyStreamer
from tests.tiny import make_law_model, ragged_prompts

LOOKUP = {"prompt_lookup_num_tokens": 5, "num_assistant_tokens_schedule": "constant"}
NUM_NEW = 40
NUM_DRAWS = 8_000  # of 256 texts


def sources(draft):
    """Prompt lookup alone, and beside the model."""
    return (None, LOOKUP), (draft, {**LOOKUP, "num_assistant_tokens": 3})


def few_words(batch_size, seed=1):
    """Prompts of five words, whose ends mostly stood before."""
    return ragged_prompts(batch_size, seed=seed, vocab_size=6, max_len=14)


def test_long_copies_after_prompts_of_one_token():
    """The draft model is fed what was copied, as many tokens of every row."""
    target, draft = pair("llama")
    prompts, store = torch.arange(1, 5)[:, None], SuffixStore()
    inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    store.add(target.generate(**inputs, max_new_tokens=NUM_NEW)[0].tolist())
    options = {**LOOKUP, "suffix_store": store, "num_assistant_tokens": 2, "max_new_tokens": NUM_NEW}
    assert_decodes_as_plain(target, draft, inputs, **options)


def test_the_adaptive_schedule_is_the_default():
    target, draft = pair("llama")
    options = {"max_new_tokens": NUM_NEW, "prompt_lookup_num_tokens": 5, "num_assistant_tokens": None}
    stats = assert_decodes_as_plain(target, None, few_words(3), **options)
    assert 0 < max(stats.rounds_by_draft_len) <= 5
    stats = assert_decodes_as_plain(target, draft, few_words(3), **options)
    assert any("as large as its target" in reason for reason in stats.fallbacks)


def test_rows_may_end_before_anything_is_drafted_and_inside_a_block():
    target, draft = pair("llama")
    inputs = few_words(3, seed=2)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)[0, inputs["input_ids"].shape[1] :].tolist()
    for end in (text[0], text[12]):
        for assistant, own in sources(draft):
            stats = assert_decodes_as_plain(target, assistant, inputs, eos_token_id=end, max_new_tokens=NUM_NEW, **own)
            assert 0 < stats.num_accepted <= stats.num_drafted


@pytest.mark.slow
@each_value(drafts=["lookup", "hybrid", "hybrid, argmax"], verifier=["rejection", "block", "coupled"])
def test_the_joint_distribution_is_the_targets(verifier, drafts):
    """The prompt of four tokens is of eight words, so that matches occur; rows of the hybrid differ in their source."""
    target = hf_speculate.enable(make_law_model(4, seed=0, dtype=torch.float32))
    draft = None if drafts == "lookup" else make_law_model(4, seed=1, sharpness=1.5, dtype=torch.float32)
    stats = SpeculationStats()
    options = {"verifier": verifier, "prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    if draft is not None:
        options |= {"num_assistant_tokens": 2, "draft_sampling": "argmax" if "argmax" in drafts else "sample"}
    counts = draw(target, draft, NUM_DRAWS, speculation_stats=stats, **options)
    assert stats.num_accepted > 0
    assert p_value(counts, joint_distribution(target)) > SIGNIFICANCE


def test_fields_of_configs_count_and_configs_stay_as_they_are(monkeypatch):
    target, stats = pair("llama")[0], SpeculationStats()
    config = GenerationConfig(max_new_tokens=9, pad_token_id=0, prompt_lookup_num_tokens=4)
    before = config.to_dict()
    many = {"num_return_sequences": 2, "do_sample": True, "seed": 1}  # which transformers' prompt lookup would not take
    target.generate(**few_words(1), generation_config=config, **many, speculation_stats=stats)
    assert 0 < max(stats.rounds_by_draft_len) <= 4
    assert config.to_dict() == before
    monkeypatch.setattr(target, "generation_config", config)
    for own, is_used in (({}, True), ({"prompt_lookup_num_tokens": None}, False)):
        target.generate(**few_words(1), **own, speculation_stats=stats)
        assert (stats.num_batch_rounds > 0) == is_used


def test_a_shorter_ngram_copies_otherwise():
    target, _ = pair("llama")
    drafted = []
    for most in (1, None):
        stats = SpeculationStats()
        target.generate(
            **few_words(1), max_new_tokens=NUM_NEW, max_matching_ngram_size=most, speculation_stats=stats, **LOOKUP
        )
        drafted.append(max(stats.rounds_by_draft_len))
    assert drafted == [4, 5]  # a match of one token is continued by four at most


def test_a_store_carries_texts_from_call_to_call():
    target, _ = pair("llama")
    inputs = ragged_prompts(2, seed=5)
    store, first, second = SuffixStore(), SpeculationStats(), SpeculationStats()
    options = {**LOOKUP, "suffix_store": store, "max_new_tokens": NUM_NEW}
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    assert_equal_ids(plain, target.generate(**inputs, **options, speculation_stats=first))
    assert store.num_tokens == 2 * NUM_NEW
    assert_equal_ids(plain, target.generate(**inputs, **options, speculation_stats=second))
    assert second.num_batch_rounds < 0.5 * first.num_batch_rounds
    store.reset()
    assert_equal_ids(plain, target.generate(**inputs, **options, speculation_stats=second))
    assert second.num_batch_rounds == first.num_batch_rounds


def test_a_call_that_fails_adds_nothing_to_the_store():
    store = SuffixStore()
    with pytest.raises(RuntimeError, match="on purpose"):
        pair("llama")[0].generate(
            **few_words(1),
            streamer=FaultyStreamer(Fault(2, RuntimeError("on purpose")), "put"),
            suffix_store=store,
            **LOOKUP,
        )
    assert store.num_tokens == 0
