"""Prompt lookup inside `generate()`, alone and beside a draft model: plain text, exact law, and what is copied."""

import pytest
import torch
from transformers import GenerationConfig

import hf_speculate
from hf_speculate import SpeculationStats, SuffixStore
from tests.cases import Streamed, assert_decodes_as_plain, assert_equal_ids, each_value, pair
from tests.generation.test_law import SIGNIFICANCE, draw, joint_law, p_value
from tests.generation.test_ownership import FailingStreamer
from tests.generation.test_stop_strings import CHARACTERS, tokenizer  # noqa: F401  # a fixture
from tests.tiny import make_law_model, ragged_prompts

LOOKUP = {"prompt_lookup_num_tokens": 5, "num_assistant_tokens_schedule": "constant"}
NUM_NEW = 40
NUM_DRAWS = 8_000  # of 256 texts


def both_ways(draft):
    """Copying alone, and beside the model."""
    return [LOOKUP, {**LOOKUP, "assistant_model": draft, "num_assistant_tokens": 3}]


def few_words(batch_size, seed=1):
    """Prompts of five words, whose ends mostly stood before."""
    return ragged_prompts(batch_size, seed=seed, vocab_size=6, max_len=14)


@pytest.mark.parametrize("way", [0, 1])
def test_a_row_may_end_before_anything_is_drafted(way):
    target, draft = pair("llama")
    inputs = few_words(3)
    first = target.generate(**inputs, max_new_tokens=1)[0, -1]  # of a row that is padded otherwise than its neighbours
    options = {"eos_token_id": int(first), "max_new_tokens": NUM_NEW}
    plain = target.generate(**inputs, **options)
    assert_equal_ids(plain, target.generate(**inputs, **options, **both_ways(draft)[way]))


def test_long_copies_after_prompts_of_one_token():
    """The draft model is fed what was copied, as many tokens of every row."""
    target, draft = pair("llama")
    prompts, store = torch.arange(1, 5)[:, None], SuffixStore()
    inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    store.add(target.generate(**inputs, max_new_tokens=NUM_NEW)[0].tolist())
    options = {**LOOKUP, "suffix_store": store, "num_assistant_tokens": 2, "max_new_tokens": NUM_NEW}
    assert_decodes_as_plain(target, draft, inputs, **options)


def test_a_round_in_which_no_row_copies_is_a_plain_step():
    target, _ = pair("llama")
    stats = SpeculationStats()
    target.generate(**ragged_prompts(1, seed=1), max_new_tokens=NUM_NEW, speculation_stats=stats, **LOOKUP)
    assert stats.rounds_by_draft_len[0] > 0
    assert stats.num_drafted == sum(num * count for num, count in stats.rounds_by_draft_len.items())


def test_the_adaptive_schedule_serves_it_and_is_the_default():
    target, draft = pair("llama")
    inputs = few_words(3)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    stats = SpeculationStats()
    assert_equal_ids(
        plain, target.generate(**inputs, max_new_tokens=NUM_NEW, prompt_lookup_num_tokens=5, speculation_stats=stats)
    )
    assert stats.num_drafted > 0
    assert max(stats.rounds_by_draft_len) <= 5
    ours = target.generate(
        **inputs, max_new_tokens=NUM_NEW, prompt_lookup_num_tokens=5, assistant_model=draft, speculation_stats=stats
    )
    assert_equal_ids(plain, ours)
    assert any("as large as its target" in reason for reason in stats.fallbacks)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_end_of_text_and_stop_strings_end_it_where_plain_ends(tokenizer, batch_size):  # noqa: F811
    target, draft = pair("llama")
    inputs = few_words(batch_size, seed=2)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)[0, inputs["input_ids"].shape[1] :].tolist()
    for ends in (
        {},
        {"eos_token_id": text[12]},
        {"stop_strings": [CHARACTERS[text[14]] + CHARACTERS[text[15]]], "tokenizer": tokenizer, "eos_token_id": 63},
    ):
        plain = target.generate(**inputs, max_new_tokens=NUM_NEW, pad_token_id=0, **ends)
        for options in both_ways(draft):
            stats = SpeculationStats()
            options = {**options, "max_new_tokens": NUM_NEW, "pad_token_id": 0, "speculation_stats": stats}
            assert_equal_ids(plain, target.generate(**inputs, **ends, **options))
            assert 0 < stats.num_accepted <= stats.num_drafted


def test_a_streamer_and_several_sequences_of_a_prompt():
    target, draft = pair("llama")
    inputs = few_words(1)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    for options in both_ways(draft):
        streamer = Streamed()
        target.generate(**inputs, max_new_tokens=NUM_NEW, streamer=streamer, **options)
        assert (streamer.ids, streamer.has_ended) == (plain[0].tolist(), True)
        many = {"do_sample": True, "seed": [7, 8, 9], "max_new_tokens": NUM_NEW, **options}
        ids = target.generate(**inputs, num_return_sequences=3, **many)
        alone = target.generate(**inputs, **{**many, "seed": 8})
        assert torch.equal(ids[1:2], alone)


@pytest.fixture(scope="module")
def law_models():
    """A prompt of four tokens in eight words: copies occur by the second or third token."""
    target = make_law_model(4, seed=0, dtype=torch.float32)
    return hf_speculate.enable(target), make_law_model(4, seed=1, sharpness=1.5, dtype=torch.float32)


@pytest.mark.slow
@each_value(drafts=["copying", "hybrid", "hybrid, argmax"], verifier=["rejection", "block", "coupled"])
def test_the_joint_law_is_the_targets(law_models, verifier, drafts):
    """Rows are apart in their texts, so that the hybrid's rounds are mixed."""
    target, draft = law_models
    stats = SpeculationStats()
    options = {"verifier": verifier, "prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    if drafts != "copying":
        options |= {"num_assistant_tokens": 2, "draft_sampling": "argmax" if "argmax" in drafts else "sample"}
    counts = draw(target, None if drafts == "copying" else draft, NUM_DRAWS, speculation_stats=stats, **options)
    assert stats.num_accepted > 0
    assert p_value(counts, joint_law(target)) > SIGNIFICANCE


def test_fields_of_configs_count_and_configs_stay_as_they_are():
    target, _ = pair("llama")
    inputs = few_words(1)
    config = GenerationConfig(
        max_new_tokens=NUM_NEW, pad_token_id=0, prompt_lookup_num_tokens=4, max_matching_ngram_size=1
    )
    stats = SpeculationStats()
    before = config.to_dict()
    ids = target.generate(**inputs, generation_config=config, num_return_sequences=2, do_sample=True, seed=1)
    assert ids.shape[0] == 2  # transformers' own prompt lookup would refuse it
    target.generate(**inputs, generation_config=config, speculation_stats=stats)
    assert config.to_dict() == before
    assert stats.num_drafted > 0
    assert max(stats.rounds_by_draft_len) <= 4
    own = target.generation_config
    target.generation_config = GenerationConfig(pad_token_id=0, prompt_lookup_num_tokens=4)
    try:
        target.generate(**inputs, max_new_tokens=NUM_NEW, num_return_sequences=2, do_sample=True, seed=1)
        target.generate(**inputs, max_new_tokens=9, speculation_stats=stats)
        assert stats.num_batch_rounds > 0
        target.generate(**inputs, max_new_tokens=9, prompt_lookup_num_tokens=None, speculation_stats=stats)
        assert stats.num_batch_rounds == 0
    finally:
        target.generation_config = own


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
            **few_words(1), streamer=FailingStreamer(2, RuntimeError), suffix_store=store, **LOOKUP
        )
    assert store.num_tokens == 0


def test_rounds_in_which_all_rows_copy_do_not_run_the_draft_model():
    target, draft = pair("llama", 10.0)  # a draft of which nothing is accepted
    calls = []
    handle = draft.register_forward_pre_hook(lambda *_: calls.append(1))
    inputs = {"input_ids": torch.tensor([[3, 4] * 20])}
    options = {**LOOKUP, "num_assistant_tokens": 3, "max_new_tokens": 100}
    stats = assert_decodes_as_plain(target, draft, inputs, **options)
    handle.remove()
    assert 0 < len(calls) < 3 * stats.num_batch_rounds
