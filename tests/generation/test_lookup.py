"""Prompt lookup inside `generate()`, alone and beside a draft model: plain text, exact distribution, drafted tokens."""

import pytest
from transformers import GenerationConfig

from hf_speculate import SpeculationStats, SuffixStore, enable
from tests.cases import assert_decodes_as_plain, assert_equal_ids, pair
from tests.reliability.faults import Fault, FaultyStreamer
from tests.tiny import make_model, ragged_prompts

LOOKUP = {"prompt_lookup_num_tokens": 5, "num_assistant_tokens_schedule": "constant"}
NUM_NEW = 40


def few_words(batch_size, seed=1):
    """Prompts of five words, whose ends mostly stood before."""
    return ragged_prompts(batch_size, seed=seed, vocab_size=6, max_len=14)


def test_lookup_drafts_alone_beside_a_draft_as_large_as_its_target():
    options = {"max_new_tokens": NUM_NEW, "prompt_lookup_num_tokens": 5, "num_assistant_tokens": None}
    stats = assert_decodes_as_plain(*pair("llama"), few_words(3), **options)
    assert 0 < max(stats.rounds_by_draft_len) <= 5
    assert any("as large as its target" in reason for reason in stats.fallbacks)


def test_fields_of_configs_count_and_configs_stay_as_they_are():
    target, stats = enable(make_model("llama")), SpeculationStats()
    config = GenerationConfig(max_new_tokens=9, pad_token_id=0, prompt_lookup_num_tokens=4)
    before = config.to_dict()
    many = {"num_return_sequences": 2, "do_sample": True, "seed": 1}  # which transformers' prompt lookup would not take
    target.generate(**few_words(1), generation_config=config, **many, speculation_stats=stats)
    assert 0 < max(stats.rounds_by_draft_len) <= 4
    assert config.to_dict() == before
    target.generation_config = config
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
