"""Layers that read the states of earlier ones: nothing is put into them, and they see what others of their type do."""

import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate.cache.columns import Columns
from hf_speculate.cache.layers import holding
from hf_speculate.cache.ragged_layer import WINDOW_SLACK, RaggedLayer
from tests.cases import assert_equal_ids, each_value, pair
from tests.tiny import SLIDING_WINDOW, ragged_prompts

KINDS = ("gemma3n", "gemma4")
NUM_NEW = 2 * SLIDING_WINDOW


def new_cache(model):
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def states(cache):
    return [(layer.keys, layer.get_seq_length()) for layer in holding(cache.layers) if layer.is_initialized]


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
    for (keys, length), (others, expected) in zip(states(ours), states(plain), strict=True):
        assert length == expected
        assert torch.allclose(keys, others)


def test_compiled_buffers_hold_none_for_them():
    target, draft = pair("gemma4", dtype=torch.float32)
    inputs, stats = ragged_prompts(3, seed=3), hf_speculate.SpeculationStats()
    options = {"num_assistant_tokens": 3, "cache_implementation": "static", "speculation_stats": stats}
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    assert_equal_ids(plain, target.generate(**inputs, max_new_tokens=NUM_NEW, assistant_model=draft, **options))
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
