"""Layers that read the states of earlier ones: nothing is put into them, and they see what others of their type do."""

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate.cache.columns import Columns
from hf_speculate.cache.layers import check_layers, holding, windows_of
from hf_speculate.cache.ragged_layer import WINDOW_SLACK, RaggedLayer
from tests.cases import assert_equal_ids, each_value, pair
from tests.tiny import SLIDING_WINDOW, make_model, noisy_copy, ragged_prompts

KINDS = ("gemma3n", "gemma4")
NUM_NEW = 2 * SLIDING_WINDOW


class Breaks(Exception):
    """Raised on purpose."""


def new_cache(model):
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def states(cache):
    return [(layer.keys, layer.get_seq_length()) for layer in holding(cache.layers) if layer.is_initialized]


@pytest.mark.parametrize("kind", KINDS)
def test_their_windows_are_those_of_their_type(kind):
    target, _ = pair(kind)
    cache = new_cache(target)
    check_layers(cache)
    assert len(holding(cache.layers)) == 2
    assert windows_of(target.config, cache) == [SLIDING_WINDOW, None] * 2


def test_windows_of_a_cache_without_such_layers_are_its_own():
    target, _ = pair("gemma2")
    assert windows_of(target.config, new_cache(target)) == [SLIDING_WINDOW, None] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_attentions_are_plain_ones(kind):
    target = hf_speculate.enable(make_model(kind, attn_implementation="eager"))
    draft = noisy_copy(target)
    inputs = ragged_prompts(1, seed=1)
    options = {"max_new_tokens": NUM_NEW, "output_attentions": True, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    ours = target.generate(**inputs, **options, assistant_model=draft, num_assistant_tokens=3)
    assert_equal_ids(plain.sequences, ours.sequences)
    assert len(ours.attentions) == len(plain.attentions)
    for step, expected in zip(ours.attentions, plain.attentions, strict=True):
        for weights, others in zip(step, expected, strict=True):
            assert weights.shape == others.shape
            assert torch.allclose(weights, others, atol=1e-5)  # the softmax is taken in float32


@each_value(kind=KINDS, cache_kind=["dynamic", "preallocated"])
def test_a_passed_cache_advances_as_in_plain_decoding(kind, cache_kind):
    target, draft = pair(kind)
    text = ragged_prompts(1, seed=2, min_len=8, max_len=8)["input_ids"]
    caches = [new_cache(target) for _ in range(2)]
    options = {"assistant_model": draft, "num_assistant_tokens": 3, "speculation_cache": cache_kind}
    for cache, extra in zip(caches, ({}, options), strict=True):
        ids = text
        for _ in range(2):  # turns
            ids = target.generate(ids, max_new_tokens=NUM_NEW, past_key_values=cache, **extra)
            ids = torch.cat([ids, ids[:, :3]], dim=1)
        cache.ids = ids
    plain, ours = caches
    assert_equal_ids(plain.ids, ours.ids)
    assert len(ours.layers) == len(plain.layers)
    for (keys, length), (others, expected) in zip(states(ours), states(plain), strict=True):
        assert length == expected
        assert torch.allclose(keys, others)


@pytest.mark.parametrize("cache_kind", ["dynamic", "preallocated"])
def test_a_failed_call_leaves_a_passed_cache_as_it_was(cache_kind):
    target, draft = pair("gemma4")
    cache = new_cache(target)
    ids = target.generate(ragged_prompts(1, seed=2)["input_ids"], max_new_tokens=NUM_NEW, past_key_values=cache)
    before, num_layers = states(cache), len(cache.layers)

    def breaks(input_ids, scores):
        if input_ids.shape[1] > ids.shape[1] + 6:
            raise Breaks
        return scores

    options = {"assistant_model": draft, "num_assistant_tokens": 3, "speculation_cache": cache_kind}
    options |= {"attention_mask": torch.ones_like(ids), "logits_processor": [breaks]}
    with pytest.raises(Breaks):
        target.generate(ids, max_new_tokens=NUM_NEW, past_key_values=cache, **options)
    assert len(cache.layers) == num_layers
    for (keys, length), (others, expected) in zip(states(cache), before, strict=True):
        assert length == expected
        assert torch.equal(keys, others)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_buffers_hold_none_for_them(kind):
    target, draft = pair(kind, dtype=torch.float32)
    inputs = ragged_prompts(3, seed=3)
    stats = hf_speculate.SpeculationStats()
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    ours = target.generate(
        **inputs,
        max_new_tokens=NUM_NEW,
        assistant_model=draft,
        num_assistant_tokens=3,
        cache_implementation="static",
        speculation_stats=stats,
    )
    assert_equal_ids(plain, ours)
    assert stats.cache == "preallocated"


def test_a_row_joins_one_whose_window_has_moved():
    written = [torch.randn(1, 1, num, 4) for num in (WINDOW_SLACK + SLIDING_WINDOW + 3, SLIDING_WINDOW + 1)]
    layers = [RaggedLayer(Columns(1), SLIDING_WINDOW) for _ in written]
    for layer, tokens in zip(layers, written, strict=True):
        layer.columns.begin(tokens.shape[2])
        layer.update(tokens, tokens)
        layer.columns.advance(tokens.shape[2])
    assert [layer.base for layer in layers] == [3, 0]
    layers[0].join(layers[1])
    for row, (tokens, first) in enumerate(zip(written, (3, 0), strict=True)):
        held = slice(first - layers[0].base, tokens.shape[2] - layers[0].base)
        for buffer in layers[0].buffers:
            assert torch.equal(buffer[row, :, held], tokens[0, :, first:])
