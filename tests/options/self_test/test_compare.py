"""Test that unknown model types are compared with plain decoding once, without a trace."""

import gc
import weakref

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_speculate
from hf_speculate import compat
from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.options.self_test.compare import NUM_TOKENS
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value
from tests.generation.test_caches import assert_same_contents, cache_contents, prefilled
from tests.support.recurrent_cases import hooks_of
from tests.support.tiny import make_model, noisy_copy, ragged_prompts
from tests.support.tiny_encoders import decoder_of, make_bart, make_t5, make_whisper

NUM_NEW = 9
# Plain decoding: steps after the prompt. Ours: the prompt, a block, and a block after a rollback.
NUM_FORWARDS = (1 + NUM_TOKENS) + 3


class Own(LlamaForCausalLM):
    """Llama of another class."""


class Strides(LlamaForCausalLM):
    """Model whose plain decoding places tokens after the prompt two positions apart."""

    def prepare_inputs_for_generation(self, *args, is_first_iteration=False, **kwargs):
        inputs = super().prepare_inputs_for_generation(
            *args, is_first_iteration=is_first_iteration, **kwargs
        )
        if not is_first_iteration:
            inputs["position_ids"] = 2 * inputs["position_ids"]
        return inputs


class Counts(LlamaForCausalLM):
    """Model that counts its tokens outside the cache, so a rollback leaves the count too high."""

    # Older versions look for the name of the cache argument.
    def forward(self, input_ids, past_key_values=None, **kwargs):
        cache = kwargs.get(CACHE_NAME, past_key_values)
        num_past = 0 if cache.get_seq_length() == 0 else self.num_read
        self.num_read = num_past + input_ids.shape[1]
        output = super().forward(input_ids=input_ids, **kwargs | {CACHE_NAME: cache})
        positions = torch.arange(self.num_read - output.logits.shape[1], self.num_read)
        output.logits[..., ::2] += (positions % 7)[:, None]
        return output


def own_model(model_class=Own, dtype=torch.float64):
    model = make_model("llama", dtype=dtype)
    model.__class__ = model_class
    return hf_speculate.enable(model)


def count_forwards(model):
    counts = []
    model.register_forward_pre_hook(lambda module, args, kwargs: counts.append(1), with_kwargs=True)
    return counts


def decode(model, inputs, **options):
    return model.generate(
        **inputs, **{"prompt_lookup_num_tokens": 3, "max_new_tokens": NUM_NEW, **options}
    )


def test_unknown_model_is_tested_once_per_kind_of_call():
    model, stats = own_model(), hf_speculate.SpeculationStats()
    counts = count_forwards(model)
    single, padded = ragged_prompts(1, seed=1), ragged_prompts(3, seed=1)
    inner = {**padded, "attention_mask": padded["attention_mask"].clone()}
    inner["attention_mask"][:, -2] = 0
    for inputs in (single, padded, inner):
        num = []
        for _ in range(2):
            counts.clear()
            ours = decode(model, inputs, speculation_stats=stats)
            num.append(len(counts))
            assert "self-test: passed, difference " in stats.plan
        assert num[0] - num[1] == NUM_FORWARDS
        assert_equal_ids(model.generate(**inputs, max_new_tokens=NUM_NEW), ours)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None  # no result keeps its model alive


def test_known_types_and_models_in_training_mode_are_not_tested():
    for model, words in (
        (hf_speculate.enable(make_model("llama")), ""),
        (own_model().train(), "self-test: skipped"),
    ):
        counts, stats = count_forwards(model), hf_speculate.SpeculationStats()
        decode(model, ragged_prompts(1, seed=1), speculation_stats=stats)
        assert len(counts) == 1 + stats.num_batch_rounds
        assert words in stats.plan
        assert words or "self-test" not in stats.plan


@pytest.mark.filterwarnings("ignore:hf_speculate was tested with transformers")
def test_known_class_is_tested_once_with_a_newer_transformers(monkeypatch):
    monkeypatch.setattr(compat.transformers, "__version__", "5.99.0")
    num_more = []
    for _ in range(2):
        model, stats = hf_speculate.enable(make_model("phi")), hf_speculate.SpeculationStats()
        counts = count_forwards(model)
        decode(model, ragged_prompts(1, seed=1), speculation_stats=stats)
        assert "self-test: passed, difference " in stats.plan
        num_more.append(len(counts) - 1 - stats.num_batch_rounds)
    assert num_more == [NUM_FORWARDS, 0]


@each_value(
    model_class=[Strides, Counts],
    dtype=[torch.float64, torch.float32, torch.float16, torch.bfloat16],
)
def test_model_that_differs_is_refused_and_round_off_passes(model_class, dtype):
    model, name = own_model(model_class, dtype), str(dtype).removeprefix("torch.")
    for _ in range(2):  # the result is kept
        with pytest.raises(
            UnsupportedModelError, match=rf"{name}, got a difference of [01]\.\d+ with left"
        ):
            decode(model, ragged_prompts(3, seed=1))
    for cache_kind in ("auto", "dynamic"):
        stats = hf_speculate.SpeculationStats()
        inputs, own = ragged_prompts(3, seed=1, max_len=40), own_model(dtype=dtype)
        decode(own, inputs, speculation_stats=stats, speculation_cache=cache_kind)
        assert "self-test: passed, difference " in stats.plan


def test_forward_that_fails_is_refused_with_its_error():
    def one_by_one(module, args, kwargs):
        if kwargs[CACHE_NAME].get_seq_length() and kwargs["input_ids"].shape[1] > 1:
            raise ValueError("one at a time")

    model = own_model()
    model.register_forward_pre_hook(one_by_one, with_kwargs=True)
    with pytest.raises(
        UnsupportedModelError, match=r"must read several .* got ValueError: one at a time; leave"
    ):
        decode(model, ragged_prompts(1, seed=1))


def test_self_test_leaves_no_trace_on_the_model():
    model, draft = own_model(Counts), make_model("llama", num_hidden_layers=1)
    inputs = ragged_prompts(2, seed=1, min_len=8, max_len=8)
    past = prefilled(model, inputs["input_ids"][:, :5])
    all_keys, contents = [layer.keys for layer in past.layers], cache_contents(past)
    state, config = torch.get_rng_state(), model.generation_config.to_dict()
    with pytest.raises(UnsupportedModelError, match="got a difference"):
        decode(
            model,
            inputs,
            **{CACHE_NAME: past},
            assistant_model=draft,
            prompt_lookup_num_tokens=None,
        )
    assert all(layer.keys is keys for layer, keys in zip(past.layers, all_keys, strict=True))
    assert_same_contents(contents, cache_contents(past))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.generation_config.to_dict() == config


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize(
    ("make", "is_lock_step"),  # if columns are positions
    [
        (make_t5, False),
        (make_bart, True),
        (lambda: decoder_of(make_whisper()), False),
        (lambda: make_model("qwen3_5"), False),
        (lambda: make_model("mamba"), False),
    ],
)
def test_models_of_every_kind_can_be_tested(make, is_lock_step):
    model = make()
    # transformers looks for "mamba" in the name.
    model.__class__ = type(f"My{type(model).__name__}", (type(model),), {})
    inputs, draft = ragged_prompts(3, seed=1, vocab_size=48), noisy_copy(model)
    stats = assert_decodes_as_plain(
        hf_speculate.enable(model), draft, inputs, max_new_tokens=NUM_NEW
    )
    assert "self-test: passed, difference " in stats.plan
    assert stats.lock_step == is_lock_step
    assert not [hook for hook in hooks_of(model) if hook.__module__.startswith("hf_speculate")]
