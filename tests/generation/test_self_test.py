"""Models of unknown types are compared with plain decoding once, refused if they differ, and left as they were."""

import gc
import weakref

import pytest
import torch
from transformers import (
    BartForConditionalGeneration,
    DynamicCache,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    VibeVoiceAsrForConditionalGeneration,
    WhisperForCausalLM,
)

import hf_speculate
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.generation.self_test import NUM_TOKENS, relative_difference
from tests.cases import assert_equal_ids, each_value
from tests.tiny import make_model, noisy_copy, ragged_prompts
from tests.tiny_encoders import decoder_of, make_bart, make_t5, make_whisper
from tests.tiny_readers import READERS

NUM_NEW = 9
NUM_FORWARDS = (1 + NUM_TOKENS) + 3  # plain steps after the prompt; ours: the prompt, a block, a block after a rollback


class Own(LlamaForCausalLM):
    """Decodes as Llama does."""


class Strides(LlamaForCausalLM):
    """Plain decoding places the tokens after the prompt two apart."""

    def prepare_inputs_for_generation(self, *args, is_first_iteration=False, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, is_first_iteration=is_first_iteration, **kwargs)
        if not is_first_iteration:
            inputs["position_ids"] = 2 * inputs["position_ids"]
        return inputs


class Counts(LlamaForCausalLM):
    """Counts the tokens that it has read, beside the cache, so that a rollback leaves it with too many."""

    def forward(self, input_ids, past_key_values=None, **kwargs):
        held = 0 if past_key_values.get_seq_length() == 0 else self.num_read
        self.num_read = held + input_ids.shape[1]
        output = super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        places = torch.arange(self.num_read - output.logits.shape[1], self.num_read)
        output.logits[..., ::2] += (places % 7)[:, None]
        return output


class OneByOne(LlamaForCausalLM):
    """Cannot read several tokens after a cached text."""

    def forward(self, input_ids, past_key_values=None, **kwargs):
        if past_key_values.get_seq_length() and input_ids.shape[1] > 1:
            raise ValueError("one at a time")
        return super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)


def own_model(model_class=Own, dtype=torch.float64):
    model = make_model("llama", dtype=dtype)
    model.__class__ = model_class
    return hf_speculate.enable(model)


def count_forwards(model):
    counts = []
    model.register_forward_pre_hook(lambda module, args, kwargs: counts.append(1), with_kwargs=True)
    return counts


def decode(model, inputs, **options):
    return model.generate(**inputs, **{"prompt_lookup_num_tokens": 3, "max_new_tokens": NUM_NEW, **options})


def test_an_unknown_model_is_tested_once_for_each_kind_of_call():
    model, stats = own_model(), hf_speculate.SpeculationStats()
    counts = count_forwards(model)
    one, padded = ragged_prompts(1, seed=1), ragged_prompts(3, seed=1)
    inner = {**padded, "attention_mask": padded["attention_mask"].clone()}
    inner["attention_mask"][:, -2] = 0
    for inputs in (one, padded, inner):
        num = {}
        for turn in ("first", "second"):
            counts.clear()
            ours = decode(model, inputs, speculation_stats=stats)
            num[turn] = len(counts)
            assert "self-test: passed, difference " in stats.plan
            assert stats.plan.endswith(" of 0.001 allowed)")
        assert num["first"] - num["second"] == NUM_FORWARDS
        assert_equal_ids(model.generate(**inputs, max_new_tokens=NUM_NEW), ours)


def test_a_known_type_is_not_tested():
    model, stats = hf_speculate.enable(make_model("llama")), hf_speculate.SpeculationStats()
    counts = count_forwards(model)
    decode(model, ragged_prompts(1, seed=1), speculation_stats=stats)
    assert len(counts) == 1 + stats.num_batch_rounds
    assert "self-test" not in stats.plan


@each_value(model_class=[Strides, Counts], dtype=[torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_model_that_decodes_otherwise_is_refused_with_the_difference(model_class, dtype):
    model = own_model(model_class, dtype)
    name = str(dtype).removeprefix("torch.")
    pattern = rf"{model_class.__name__} must give the same .* spread in {name}, got a difference of [01]\.\d+ with left"
    for _ in range(2):  # the result is kept
        with pytest.raises(UnsupportedModelError, match=pattern):
            decode(model, ragged_prompts(3, seed=1))


def test_a_forward_that_fails_is_refused_with_its_error():
    with pytest.raises(
        UnsupportedModelError, match=r"OneByOne must read several .* got ValueError: one at a time; leave"
    ):
        decode(own_model(OneByOne), ragged_prompts(1, seed=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_round_off_is_no_difference(dtype):
    stats = hf_speculate.SpeculationStats()
    for cache_kind in ("auto", "dynamic"):
        inputs = ragged_prompts(3, seed=1, max_len=40)
        decode(own_model(dtype=dtype), inputs, speculation_stats=stats, speculation_cache=cache_kind)
        assert "self-test: passed, difference " in stats.plan


@pytest.mark.parametrize("model_class", [Own, Counts])
def test_nothing_is_left_behind(model_class):
    model, draft = own_model(model_class), make_model("llama", num_hidden_layers=1)
    inputs = ragged_prompts(2, seed=1, min_len=8, max_len=8)
    with torch.no_grad():
        past = model(inputs["input_ids"][:, :5], past_key_values=DynamicCache()).past_key_values
    held = [(layer.keys, layer.values, layer.keys.clone(), layer.values.clone()) for layer in past.layers]
    state, config = torch.get_rng_state(), model.generation_config.to_dict()
    options = {"past_key_values": past, "assistant_model": draft, "prompt_lookup_num_tokens": None}
    if model_class is Own:
        decode(model, inputs, **options)
        assert past.get_seq_length() == 8 + NUM_NEW - 1
    else:
        with pytest.raises(UnsupportedModelError, match="got a difference"):
            decode(model, inputs, **options)
        assert past.get_seq_length() == 5
        assert all(
            layer.keys is keys and layer.values is values
            for layer, (keys, values, *_) in zip(past.layers, held, strict=True)
        )
    assert all(torch.equal(keys, copy) and torch.equal(values, other) for keys, values, copy, other in held)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.generation_config.to_dict() == config


def test_a_result_does_not_keep_its_model():
    model = own_model()
    decode(model, ragged_prompts(1, seed=1))
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_dropout_leaves_nothing_to_compare():
    model, stats = own_model().train(), hf_speculate.SpeculationStats()
    decode(model, ragged_prompts(1, seed=1), speculation_stats=stats)
    assert "self-test: skipped, for the model is in training mode" in stats.plan


@pytest.mark.parametrize("num_new", [1, 2, 3, 4])
def test_short_calls_are_tested_as_far_as_they_go(num_new):
    model, stats = own_model(), hf_speculate.SpeculationStats()
    inputs = ragged_prompts(1, seed=1)
    counts = count_forwards(model)
    decode(model, inputs, max_new_tokens=num_new, speculation_stats=stats)
    expected = {1: 0, 2: 2 + 2, 3: 3 + 2, 4: 4 + 3}[num_new]
    assert len(counts) - 1 - stats.num_batch_rounds == expected
    with pytest.raises(UnsupportedModelError, match="got a difference"):  # later, if not now
        strides = own_model(Strides)
        for num in (num_new, NUM_NEW):
            decode(strides, inputs, max_new_tokens=num)


@pytest.mark.parametrize(
    ("base", "make"),
    [
        (T5ForConditionalGeneration, make_t5),
        (BartForConditionalGeneration, make_bart),
        (WhisperForCausalLM, lambda: decoder_of(make_whisper())),
    ],
)
def test_every_kind_of_model_can_be_tested(base, make):
    model, stats = make(), hf_speculate.SpeculationStats()
    model.__class__ = type("Own", (base,), {})
    inputs = ragged_prompts(3, seed=1, vocab_size=48)
    plain = model.generate(**inputs, max_new_tokens=NUM_NEW)
    options = {"assistant_model": noisy_copy(model), "prompt_lookup_num_tokens": None, "speculation_stats": stats}
    assert_equal_ids(plain, decode(hf_speculate.enable(model), inputs, **options))
    assert "self-test: passed, difference " in stats.plan


def test_noise_that_a_reader_draws_is_the_same_twice():
    model, inputs, _ = READERS["input_values"]()
    model.__class__ = type("Own", (VibeVoiceAsrForConditionalGeneration,), {})
    hf_speculate.enable(model)
    texts = []
    for options in ({"prompt_lookup_num_tokens": None}, {}):
        torch.manual_seed(3)
        texts.append(decode(model, inputs, **options))
    assert_equal_ids(*texts)


def test_what_a_difference_is():
    plain = torch.tensor([[[1.0, 3.0, -4.0]], [[0.0, 2.0, torch.finfo(torch.float32).min]]])
    assert relative_difference(plain, plain + 5) == pytest.approx(0, abs=1e-6)  # the same probabilities
    other = plain.clone()
    other[1, 0, :2] = torch.tensor([1.0, 1.0])
    assert relative_difference(plain, other) == pytest.approx(1)
    other[1, 0, 2] = 0
    assert relative_difference(plain, other) == torch.inf
    nothing = torch.full((1, 1, 3), torch.nan)
    assert relative_difference(nothing, nothing) == 0
