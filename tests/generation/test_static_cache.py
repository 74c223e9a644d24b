"""A static cache comes back as plain `generate` returns it, and may be passed in."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticSlidingWindowLayer

from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import assert_equal_ids, each_value, pair, plain_and_ours
from tests.generation.test_batch_cache import PAD, SAID, ends, prompts
from tests.generation.test_encoder_decoder import encoder_pair, inputs_of
from tests.generation.test_ownership import STATE_TOLERANCE, FailingCriterion, FailingStreamer
from tests.tiny import SLIDING_WINDOW, ragged_prompts

K = 4
NUM_NEW = 14
ROOM = 96  # tokens, more than two turns have
FLOAT32_TOLERANCE = 1e-4  # attention of Gemma 2 takes its softmax in float32, whatever the dtype
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


@pytest.mark.parametrize(
    ("kind", "batch_size", "max_cache_len"),
    [("llama", 1, None), ("llama", 4, ROOM), ("mistral_window", 4, None), ("gemma2", 4, None)],
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
    ours = target.generate(**inputs, **options, assistant_model=draft, num_assistant_tokens=K)
    assert vars(target) == before
    assert_equal_ids(plain.sequences, ours.sequences)
    tolerance = FLOAT32_TOLERANCE if kind == "gemma2" else STATE_TOLERANCE
    assert_same(contents(plain.past_key_values), contents(ours.past_key_values), tolerance)


def test_recurrent_states_are_returned_in_a_static_cache_and_may_not_be_passed():
    target, draft = pair("jamba")
    options = {"cache_implementation": "static", "max_new_tokens": NUM_NEW, "return_dict_in_generate": True}
    plain, ours = plain_and_ours(target, draft, ONE_ROW, **options)
    assert_equal_ids(plain.sequences, ours.sequences)
    for expected, layer in zip(plain.past_key_values.layers, ours.past_key_values.layers, strict=True):
        assert type(layer) is type(expected)
        for name in ("conv_states", "recurrent_states", "has_previous_state", "keys", "values"):
            torch.testing.assert_close(getattr(layer, name, None), getattr(expected, name, None), atol=1e-5, rtol=0)
    cache = StaticCache(target.config, ROOM)
    with pytest.raises(UnsupportedGenerationError, match="got one of LinearAttentionLayer, StaticLayer"):
        target.generate(**ONE_ROW, assistant_model=draft, max_new_tokens=2, past_key_values=cache)


def turns(first: dict[str, Any], second: dict[str, Any], kind: str, inputs: dict[str, Tensor]) -> tuple[Tensor, Cache]:
    """Two turns of a chat on one static cache: the text, and the cache."""
    target, _ = pair(kind)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": list(ends(kind)), "pad_token_id": PAD}
    static = {"cache_implementation": "static", "max_cache_len": ROOM, "return_dict_in_generate": True}
    output = copy.deepcopy(target).generate(**inputs, **options, **first, **static)
    ids = torch.cat([output.sequences, SAID[: len(output.sequences)]], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    held = output.past_key_values
    before = [layer.keys.data_ptr() for layer in held.layers]
    text = target.generate(ids, attention_mask=mask, **options, **second, past_key_values=held)
    assert [layer.keys.data_ptr() for layer in held.layers] == before
    return text, held


@each_value(batch_size=[1, 4], kind=["llama", "mistral_window"])
def test_a_cache_may_be_passed_back_in_whoever_returned_it(kind, batch_size):
    own = {"assistant_model": pair(kind)[1], "num_assistant_tokens": K}
    inputs = prompts() if batch_size > 1 else ONE_ROW
    text, held = turns({}, {}, kind, inputs)
    for first, second in (({}, own), (own, {}), (own, {**own, "speculation_cache": "dynamic"})):
        ours, ours_held = turns(first, second, kind, inputs)
        assert_equal_ids(text, ours)
        assert_same(contents(held), contents(ours_held))


def test_the_caches_of_an_encoder_decoder():
    target, draft = encoder_pair("t5")
    options = {"cache_implementation": "static", "max_cache_len": ROOM, "max_new_tokens": NUM_NEW, **inputs_of("t5", 2)}
    plain = copy.deepcopy(target).generate(**options, return_dict_in_generate=True).past_key_values
    ours = target.generate(**options, return_dict_in_generate=True, assistant_model=draft)
    assert all(type(part) is StaticCache for part in parts_of(ours.past_key_values))
    assert_same(contents(plain), contents(ours.past_key_values))
    del options["cache_implementation"], options["max_cache_len"]
    options["decoder_input_ids"] = ours.sequences
    fresh = target.generate(**options)  # plain feeds a passed cache the whole text again
    assert_equal_ids(fresh, target.generate(**options, assistant_model=draft, past_key_values=plain))
    assert [int(part.get_seq_length()) for part in parts_of(plain)] == [fresh.shape[1] - 1, 12]


class FailingEnd(FailingStreamer):
    def end(self):
        raise self.error("on purpose")


@each_value(
    kind=["llama", "mistral_window"],
    failing=[{"stopping_criteria": [FailingCriterion(5, RuntimeError)]}, {"streamer": FailingEnd(10**6, RuntimeError)}],
)
def test_a_passed_static_cache_stays_as_it_was_in_a_call_that_fails(kind, failing):
    target, draft = pair(kind)
    cache = StaticCache(config=target.config, max_cache_len=ROOM)
    ids = target.generate(ONE_ROW["input_ids"], max_new_tokens=2 * SLIDING_WINDOW, past_key_values=cache)
    before = contents(cache)
    with pytest.raises(RuntimeError, match="on purpose"):
        target.generate(ids, max_new_tokens=9, past_key_values=cache, assistant_model=draft, **failing)
    assert_same(before, contents(cache), tolerance=0)


def test_a_static_cache_without_room_is_refused_with_the_room_that_it_takes():
    target, draft = pair("llama")
    inputs = ragged_prompts(1, seed=1, min_len=6)
    num_columns = inputs["input_ids"].shape[1] + 9 - 1
    options = {"max_new_tokens": 9, "assistant_model": draft, "num_assistant_tokens": K}
    cache = StaticCache(config=target.config, max_cache_len=num_columns - 1)
    with pytest.raises(UnsupportedGenerationError, match=f"make it with max_cache_len={num_columns}"):
        target.generate(**inputs, **options, past_key_values=cache)
    assert not cache.layers[0].is_initialized
    cache = StaticCache(config=target.config, max_cache_len=num_columns)
    plain = target.generate(**inputs, max_new_tokens=9)
    assert_equal_ids(plain, target.generate(**inputs, **options, past_key_values=cache))
    windows, draft = pair("mistral_window")
    cache = StaticCache(config=windows.config, max_cache_len=ROOM)  # which keep their windows of any length of text
    plain = windows.generate(**inputs, max_new_tokens=2 * ROOM)
    ours = windows.generate(**inputs, max_new_tokens=2 * ROOM, assistant_model=draft, past_key_values=cache)
    assert_equal_ids(plain, ours)
