"""A static cache comes back as plain `generate` returns it, and may be passed in."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache, StoppingCriteriaList
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticSlidingWindowLayer

from hf_speculate.cache.static import static_copy, write_back
from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import assert_equal_ids, each_value, pair
from tests.generation.test_batch_cache import PAD, SAID, ends, prompts
from tests.generation.test_encoder_decoder import encoder_pair, inputs_of
from tests.generation.test_ownership import STATE_TOLERANCE, FailingCriterion, FailingStreamer
from tests.tiny import SLIDING_WINDOW, ragged_prompts

K = 4
NUM_NEW = 14
ROOM = 96  # tokens, more than two turns have
FLOAT32_TOLERANCE = 1e-4  # attention of Gemma 2 takes its softmax in float32, whatever the dtype
KINDS = ("llama", "mistral_window", "gemma2")
ONE_ROW = {"input_ids": torch.tensor([[5, 6, 7, 9]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}


def parts_of(cache: Cache) -> list[Any]:
    is_pair = isinstance(cache, EncoderDecoderCache)
    return [cache.self_attention_cache, cache.cross_attention_cache] if is_pair else [cache]


def contents(cache: Cache) -> list[tuple]:
    """Of each layer: its class, its length, and its columns but for a full window's oldest, which is never read."""
    found = []
    for layer in (layer for part in parts_of(cache) for layer in part.layers if layer.is_initialized):
        length = int(layer.get_seq_length())
        first = int(isinstance(layer, StaticSlidingWindowLayer) and length >= layer.max_cache_len)
        found.append((type(layer), length, layer.keys[:, :, first:].clone(), layer.values[:, :, first:].clone()))
    return found


def assert_same(one: list[tuple], other: list[tuple], tolerance: float = STATE_TOLERANCE) -> None:
    assert len(one) == len(other) > 0
    for (*kinds, keys, values), (*other_kinds, other_keys, other_values) in zip(one, other, strict=True):
        assert kinds == other_kinds
        torch.testing.assert_close(keys, other_keys, atol=tolerance, rtol=0)
        torch.testing.assert_close(values, other_values, atol=tolerance, rtol=0)


def speculative(draft: Any) -> dict[str, Any]:
    return {"assistant_model": draft, "num_assistant_tokens": K}


@pytest.mark.parametrize(
    ("kind", "batch_size", "max_cache_len"),
    [
        ("llama", 1, None),
        ("llama", 4, ROOM),
        ("mistral_window", 1, ROOM),
        ("mistral_window", 4, None),
        ("gemma2", 4, None),
    ],
)
def test_the_cache_that_is_returned_is_that_of_plain(kind, batch_size, max_cache_len):
    target, draft = pair(kind)
    inputs = prompts() if batch_size > 1 else ONE_ROW
    options = {"cache_implementation": "static", "max_cache_len": max_cache_len, "max_new_tokens": NUM_NEW}
    options |= {"return_dict_in_generate": True, "eos_token_id": list(ends(kind)), "pad_token_id": PAD}
    plain_target = copy.deepcopy(target)
    vars(plain_target).pop("_previous_max_cache_length", None)  # which plain calls leave, and later ones use
    plain = plain_target.generate(**inputs, **options)
    before = vars(target).copy()
    ours = target.generate(**inputs, **options, **speculative(draft))
    assert vars(target) == before
    assert_equal_ids(plain.sequences, ours.sequences)
    assert type(ours.past_key_values) is type(plain.past_key_values) is StaticCache
    tolerance = FLOAT32_TOLERANCE if kind == "gemma2" else STATE_TOLERANCE
    assert_same(contents(plain.past_key_values), contents(ours.past_key_values), tolerance)


@pytest.mark.parametrize("kind", ["jamba", "falcon_h1"])
def test_recurrent_states_are_returned_in_a_static_cache(kind):
    target, draft = pair(kind)
    options = {"cache_implementation": "static", "max_new_tokens": NUM_NEW, "return_dict_in_generate": True}
    plain, ours = (target.generate(**ONE_ROW, **options, **own) for own in ({}, speculative(draft)))
    assert_equal_ids(plain.sequences, ours.sequences)
    for expected, layer in zip(plain.past_key_values.layers, ours.past_key_values.layers, strict=True):
        assert type(layer) is type(expected)
        for name in ("conv_states", "recurrent_states", "has_previous_state", "keys", "values"):
            torch.testing.assert_close(getattr(layer, name, None), getattr(expected, name, None), atol=1e-5, rtol=0)


def test_a_static_cache_with_recurrent_states_is_refused_by_its_layers():
    target, draft = pair("qwen3_5")
    inputs = ragged_prompts(2, seed=1)
    cache = StaticCache(config=target.config, max_cache_len=ROOM)
    with pytest.raises(UnsupportedGenerationError, match=r"got one of LinearAttentionLayer, StaticLayer; pass a Dyn"):
        target.generate(**inputs, **speculative(draft), max_new_tokens=2, past_key_values=cache)


def turns(first: dict[str, Any], second: dict[str, Any], kind: str, inputs: dict[str, Tensor]) -> tuple[Tensor, Cache]:
    """Two turns of a chat on one static cache: the text, and the cache."""
    target, _ = pair(kind)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": list(ends(kind)), "pad_token_id": PAD}
    output = copy.deepcopy(target).generate(
        **inputs, **options, **first, cache_implementation="static", max_cache_len=ROOM, return_dict_in_generate=True
    )
    said = SAID[: len(output.sequences)]
    ids = torch.cat([output.sequences, said], dim=1)
    mask = torch.cat(
        [inputs["attention_mask"], torch.ones(len(ids), ids.shape[1] - inputs["attention_mask"].shape[1])], 1
    )
    held = output.past_key_values
    before = [layer.keys.data_ptr() for layer in held.layers]
    text = target.generate(ids, attention_mask=mask.long(), **options, **second, past_key_values=held)
    assert [layer.keys.data_ptr() for layer in held.layers] == before
    return text, held


@each_value(batch_size=[1, 4], kind=["llama", "mistral_window"])
def test_a_cache_may_be_passed_back_in_whoever_returned_it(kind, batch_size):
    own = speculative(pair(kind)[1])
    inputs = prompts() if batch_size > 1 else ONE_ROW
    text, held = turns({}, {}, kind, inputs)
    for first, second in (({}, own), (own, {}), (own, {**own, "speculation_cache": "dynamic"})):
        ours, ours_held = turns(first, second, kind, inputs)
        assert_equal_ids(text, ours)
        assert_same(contents(held), contents(ours_held))


def test_the_caches_of_an_encoder_decoder():
    target, draft = encoder_pair("t5")
    inputs, options = inputs_of("t5", 2), {"max_new_tokens": NUM_NEW, "return_dict_in_generate": True}
    static = {"cache_implementation": "static", "max_cache_len": ROOM}
    plain = copy.deepcopy(target).generate(**inputs, **options, **static)
    ours = target.generate(**inputs, **options, **static, **speculative(draft))
    assert all(type(part) is StaticCache for part in parts_of(ours.past_key_values))
    assert_same(contents(plain.past_key_values), contents(ours.past_key_values))
    more = {"decoder_input_ids": ours.sequences}
    fresh = target.generate(**inputs, **options, **more)  # plain feeds a passed cache the whole text again
    again = target.generate(**inputs, **options, **more, **speculative(draft), past_key_values=plain.past_key_values)
    assert_equal_ids(fresh.sequences, again.sequences)
    assert again.past_key_values is plain.past_key_values
    lens = [int(part.get_seq_length()) for part in parts_of(again.past_key_values)]
    assert lens == [part.get_seq_length() for part in parts_of(fresh.past_key_values)]


@each_value(kind=["llama", "mistral_window"], fault=["criterion", "end of the stream"])
def test_a_passed_static_cache_stays_as_it_was_in_a_call_that_fails(kind, fault):
    target, draft = pair(kind)
    cache = StaticCache(config=target.config, max_cache_len=ROOM)
    ids = target.generate(ONE_ROW["input_ids"], max_new_tokens=2 * SLIDING_WINDOW, past_key_values=cache)
    before = contents(cache)
    failing: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([FailingCriterion(5, RuntimeError)])}
    if fault == "end of the stream":
        failing = {"streamer": FailingEnd(10**6, RuntimeError)}
    with pytest.raises(RuntimeError, match="on purpose"):
        target.generate(ids, max_new_tokens=9, past_key_values=cache, **speculative(draft), **failing)
    assert_same(before, contents(cache), tolerance=0)


class FailingEnd(FailingStreamer):
    def end(self):
        raise self.error("on purpose")


def test_a_copy_that_fails_leaves_the_static_cache_as_it_was():
    target, _ = pair("mistral_window")
    dynamic = DynamicCache(config=target.config)
    ids = target.generate(ONE_ROW["input_ids"], max_new_tokens=2 * SLIDING_WINDOW, past_key_values=dynamic)
    static = static_copy(dynamic, target.config, ROOM)
    before = [(layer.keys.clone(), layer.cumulative_length_int) for layer in static.layers]
    target.generate(ids, max_new_tokens=3, past_key_values=dynamic)
    dynamic.layers[-1].values = dynamic.layers[-1].values[:, :, :, :3]
    with pytest.raises(RuntimeError):
        write_back(dynamic, static)
    for layer, (keys, length) in zip(static.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert layer.cumulative_length_int == length


def test_a_static_cache_without_room_is_refused_with_the_room_that_it_takes():
    target, draft = pair("llama")
    inputs = ragged_prompts(1, seed=1, min_len=6)
    num_columns = inputs["input_ids"].shape[1] + 9 - 1
    options = {"max_new_tokens": 9, **speculative(draft)}
    cache = StaticCache(config=target.config, max_cache_len=num_columns - 1)
    message = rf"room for {num_columns} tokens, got .* for {num_columns - 1}; make it with max_cache_len={num_columns}"
    with pytest.raises(UnsupportedGenerationError, match=message):
        target.generate(**inputs, **options, past_key_values=cache)
    assert not cache.layers[0].is_initialized
    cache = StaticCache(config=target.config, max_cache_len=num_columns)
    assert_equal_ids(
        target.generate(**inputs, max_new_tokens=9), target.generate(**inputs, **options, past_key_values=cache)
    )
    windows, draft = pair("mistral_window")
    cache = StaticCache(config=windows.config, max_cache_len=ROOM)  # which keep their windows of any length of text
    options = {"max_new_tokens": 2 * ROOM}
    plain = windows.generate(**inputs, **options)
    assert_equal_ids(plain, windows.generate(**inputs, **options, **speculative(draft), past_key_values=cache))
