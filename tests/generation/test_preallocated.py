"""States in preallocated buffers give the text of plain `generate`, whatever grows, ends or is rolled back."""

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate.cache.ragged_layer import MIN_STEP, WINDOW_SLACK
from hf_speculate.errors import UnsupportedModelError
from tests.cases import AttentionCalls, assert_decodes_as_plain, assert_equal_ids, each_value, pair
from tests.generation.test_passed_caches import assert_same_contents, cache_contents
from tests.tiny import KINDS, SLIDING_WINDOW, make_model, noisy_copy, ragged_prompts

K = 4
FITTING = tuple(kind for kind in KINDS if kind != "bloom")  # its positions are biases of the attention


@pytest.mark.parametrize("kind", FITTING)
def test_text_equals_plain_and_the_dynamic_cache_while_buffers_grow_and_windows_move(kind):
    """The prompt fills a window's buffers, which move once before the text is as long as the first step of growth."""
    inputs = ragged_prompts(5, seed=5, max_len=WINDOW_SLACK + 3 * SLIDING_WINDOW)
    assert MIN_STEP < 90
    for cache_kind, chunk_size in (("dynamic", None), ("preallocated", None), ("preallocated", 41)):
        options = {"max_new_tokens": 90, "prefill_chunk_size": chunk_size, "num_assistant_tokens": K}
        stats = assert_decodes_as_plain(*pair(kind), inputs, **options, speculation_cache=cache_kind)
        assert stats.cache == cache_kind


@each_value(attention=["eager", "sdpa"], kind=["llama", "mistral_window", "llama"], cache_kind=["preallocated", "auto"])
def test_a_chunk_of_padding_alone_leaves_the_states_of_plain(kind, attention, cache_kind):
    """In float32, where the tests' models do not keep masks finite themselves: NaNs would reach real tokens."""
    target = hf_speculate.enable(make_model(kind, dtype=torch.float32, attn_implementation=attention))
    inputs = ragged_prompts(3, seed=1)
    assert not inputs["attention_mask"][2, :9].any()
    options = {"max_new_tokens": 12, "prefill_chunk_size": 3, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    own = {"assistant_model": noisy_copy(target), "num_assistant_tokens": K, "speculation_cache": cache_kind}
    ours = target.generate(**inputs, **options, **own)
    assert_equal_ids(plain.sequences, ours.sequences)
    assert_same_contents(*(cache_contents(one.past_key_values) for one in (plain, ours)), 1e-4)
    options["return_dict_in_generate"] = False  # nobody sees the states then, and the text's must hold all the same
    assert_equal_ids(plain.sequences, target.generate(**inputs, **options, **own))


def test_a_window_layer_holds_its_window_however_long_the_text():
    (target, draft), inputs = pair("cohere2"), ragged_prompts(1, min_len=230, max_len=230)
    options = {"max_new_tokens": 150, "num_assistant_tokens": K, "speculation_cache": "preallocated"}
    with AttentionCalls() as calls:
        target.generate(**inputs, **options, assistant_model=draft)
    bytes_of_column = calls.keys[0][:, :, :1].nbytes
    last = [(keys.shape[2], keys.untyped_storage().nbytes() // bytes_of_column) for keys in calls.keys[-8:]]
    windowed, full = (last[place::2] for place in (0, 1))
    assert min(seen for seen, _ in full) > 360
    assert max(seen for seen, _ in windowed) <= SLIDING_WINDOW + K + 1
    assert max(capacity for _, capacity in windowed) < SLIDING_WINDOW + WINDOW_SLACK + 2 * MIN_STEP < 360


def test_the_dynamic_cache_serves_what_cannot_be_preallocated():
    target, inputs = pair("llama")[0], {"input_ids": torch.tensor([[5, 6, 7]])}
    passed, holes = {"past_key_values": DynamicCache(config=target.config)}, torch.tensor([[1, 0, 1]])
    for kind, given, message in (
        ("bloom", inputs, "auto or dynamic for BloomForCausalLM, got 'preallocated'"),
        ("llama", {**inputs, "attention_mask": holes}, "the attention mask has holes"),
        ("llama", {**inputs, **passed}, None),  # the user's own cache: no second copy
    ):
        target, draft = pair(kind)
        own = {"assistant_model": draft, "max_new_tokens": 6, "speculation_stats": hf_speculate.SpeculationStats()}
        target.generate(**given, **own)
        assert own["speculation_stats"].cache == "dynamic"
        if message:
            with pytest.raises(UnsupportedModelError, match=message):
                target.generate(**given, **own, speculation_cache="preallocated")


def test_a_cache_that_knows_no_windows_is_not_taken_for_one_of_full_attention():
    target, draft = pair("mistral_window")
    options = {**ragged_prompts(1, seed=1, min_len=6), "max_new_tokens": 3 * SLIDING_WINDOW}
    own = {"assistant_model": draft, "past_key_values": DynamicCache()}  # without its config, all layers are full ones
    target(options["input_ids"][:, :4], past_key_values=own["past_key_values"])
    with pytest.raises(UnsupportedModelError, match="made without its config, and knows no windows"):
        target.generate(**options, **own, speculation_cache="preallocated")
    assert_equal_ids(target.generate(**options), target.generate(**options, **own))
