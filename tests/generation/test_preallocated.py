"""States in preallocated buffers give the text of plain `generate`, whatever grows, ends or is rolled back."""

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate.cache import ragged_layer
from hf_speculate.cache.columns import Columns
from hf_speculate.errors import UnsupportedModelError
from tests.cases import assert_equal_ids, each_value, pair
from tests.tiny import KINDS, SLIDING_WINDOW, make_model, noisy_copy, ragged_prompts

K = 4
FITTING = tuple(kind for kind in KINDS if kind != "bloom")  # its positions are biases of the attention


def both_caches(kind, batch_size, **options):
    """Ids by plain `generate` and by each cache, and the statistics of the second."""
    target, draft = pair(kind)
    inputs = ragged_prompts(batch_size, seed=batch_size, max_len=3 * SLIDING_WINDOW)
    plain = target.generate(**inputs, **options)
    stats = hf_speculate.SpeculationStats()
    own = {"assistant_model": draft, "num_assistant_tokens": K, "speculation_stats": stats}
    dynamic = target.generate(**inputs, **options, **own, speculation_cache="dynamic")
    assert stats.cache == "dynamic"
    return plain, dynamic, target.generate(**inputs, **options, **own), stats


@each_value(kind=FITTING, batch_size=[5])
def test_text_equals_plain_and_the_dynamic_cache_while_buffers_grow_and_windows_move(kind, batch_size, monkeypatch):
    monkeypatch.setattr(ragged_layer, "MIN_STEP", 7)
    monkeypatch.setattr(ragged_layer, "WINDOW_SLACK", 2 * K)
    plain, dynamic, preallocated, stats = both_caches(kind, batch_size, max_new_tokens=90)
    assert stats.cache == "preallocated"
    assert_equal_ids(plain, dynamic)
    assert_equal_ids(plain, preallocated)


@each_value(chunk_size=[2, 11], kind=["llama", "mistral_window"])
def test_a_prompt_may_come_in_chunks(kind, chunk_size, monkeypatch):
    monkeypatch.setattr(ragged_layer, "WINDOW_SLACK", 0)
    plain, _, preallocated, _ = both_caches(kind, 2, max_new_tokens=12, prefill_chunk_size=chunk_size)
    assert_equal_ids(plain, preallocated)


@each_value(attention=["eager", "sdpa"], kind=["llama", "mistral_window"])
def test_a_chunk_of_padding_alone_leaves_the_states_of_plain(kind, attention):
    """In float32, where the tests' models do not keep masks finite themselves."""
    target = hf_speculate.enable(make_model(kind, dtype=torch.float32, attn_implementation=attention))
    inputs = ragged_prompts(3, seed=1)
    assert not inputs["attention_mask"][2, :9].any()
    options = {"max_new_tokens": 12, "prefill_chunk_size": 3, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    own = {"assistant_model": noisy_copy(target), "num_assistant_tokens": K, "speculation_cache": "preallocated"}
    ours = target.generate(**inputs, **options, **own)
    assert_equal_ids(plain.sequences, ours.sequences)
    for layer, expected in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert torch.allclose(layer.keys, expected.keys, atol=1e-4)
        assert torch.allclose(layer.values, expected.values, atol=1e-4)
    options["return_dict_in_generate"] = False  # nobody sees the states then, and the text's must hold all the same
    assert_equal_ids(plain.sequences, target.generate(**inputs, **options, **own))


def test_a_window_layer_holds_its_window_however_long_the_text(monkeypatch):
    monkeypatch.setattr(ragged_layer, "MIN_STEP", 8)
    monkeypatch.setattr(ragged_layer, "WINDOW_SLACK", 8)
    held = []
    update = ragged_layer.RaggedLayer.update

    def watched(self, *args, **kwargs):
        seen = update(self, *args, **kwargs)
        held.append((self.window, self.capacity, seen[0].shape[2]))
        return seen

    monkeypatch.setattr(ragged_layer.RaggedLayer, "update", watched)
    plain, _, preallocated, _ = both_caches("gemma2", 1, max_new_tokens=150)
    assert_equal_ids(plain, preallocated)
    longest = plain.shape[1]
    assert max(capacity for window, capacity, _ in held if window is None) > longest - 8
    windowed = [(capacity, seen) for window, capacity, seen in held if window is not None]
    assert max(capacity for capacity, _ in windowed) < 6 * SLIDING_WINDOW
    assert max(seen for _, seen in windowed[-8:]) <= SLIDING_WINDOW + K + 1


def test_no_state_moves_when_rows_are_rolled_back():
    columns = Columns(2)
    layer = ragged_layer.RaggedLayer(columns)
    columns.begin(6)
    layer.update(torch.randn(2, 1, 6, 4), torch.randn(2, 1, 6, 4))
    columns.advance(6)
    places = [buffer.data_ptr() for buffer in layer.buffers]
    for lens in ([3, 5], [4, 6], [1, 2]):
        columns.cut(lens)
        columns.begin(1)
        before = [buffer.clone() for buffer in layer.buffers]
        layer.update(torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4))
        assert [buffer.data_ptr() for buffer in layer.buffers] == places
        for buffer, old in zip(layer.buffers, before, strict=True):
            changed = (buffer != old).any(-1).nonzero()[:, [0, 2]].tolist()
            assert changed == [[row, length] for row, length in enumerate(lens)]


def test_the_dynamic_cache_serves_what_cannot_be_preallocated():
    stats = hf_speculate.SpeculationStats()
    target, draft = pair("bloom")
    own = {"assistant_model": draft, "max_new_tokens": 6, "speculation_stats": stats}
    ids = torch.tensor([[5, 6, 7]])
    target.generate(ids, **own)
    assert stats.cache == "dynamic"
    with pytest.raises(UnsupportedModelError, match="auto or dynamic for BloomForCausalLM, got 'preallocated'"):
        target.generate(ids, **own, speculation_cache="preallocated")
    target, draft = pair("llama")
    own["assistant_model"] = draft
    target.generate(ids, **own, past_key_values=DynamicCache(config=target.config))
    assert stats.cache == "dynamic"  # the user's own cache: no second copy
    holes = torch.tensor([[1, 0, 1]])
    plain = target.generate(ids, attention_mask=holes, max_new_tokens=6)
    assert_equal_ids(plain, target.generate(ids, attention_mask=holes, **own))
    assert stats.cache == "dynamic"
    with pytest.raises(UnsupportedModelError, match="the attention mask has holes"):
        target.generate(ids, attention_mask=holes, **own, speculation_cache="preallocated")


@pytest.mark.parametrize("kind", ["mistral_window", "gemma2"])
def test_a_cache_that_knows_no_windows_is_not_taken_for_one_of_full_attention(kind):
    target, draft = pair(kind)
    inputs = ragged_prompts(1, seed=1, min_len=6)
    cache = DynamicCache()  # without its config, all of its layers are full ones
    target(inputs["input_ids"][:, :4], past_key_values=cache)
    own = {"assistant_model": draft, "max_new_tokens": 3 * SLIDING_WINDOW, "past_key_values": cache}
    with pytest.raises(UnsupportedModelError, match="made without its config, and knows no windows"):
        target.generate(**inputs, **own, speculation_cache="preallocated")
    assert_equal_ids(target.generate(**inputs, max_new_tokens=3 * SLIDING_WINDOW), target.generate(**inputs, **own))
