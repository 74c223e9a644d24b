"""Test user hooks and replaced forwards in the target: plain text, and a fallback with a reason."""

import types
from functools import partial

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.models.foreign_code import foreign_code
from hf_speculate.models.module_walk import (
    adapters_by_row,
    forward_hook_ids,
    has_hooks_of_others,
)
from hf_speculate.options.refill.continuous import ContinuousDecoder
from hf_speculate.options.refill.row_prompts import RowPrompt
from tests.cases import Streamed, assert_equal_ids, new_pair
from tests.support.tiny import ragged_prompts

NUM_NEW = 12
HIDDEN = 32


def of_user(function):
    """Return the function as if a user's script had defined it; test hooks count as known."""
    scope = {**function.__globals__, "__name__": "__main__"}
    return types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )


def with_hidden(output, change):
    """Return a layer's output, a tensor or a tuple, with changed hidden states [B, Q, D]."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


VECTOR = torch.linspace(-2, 2, HIDDEN, dtype=torch.float64)


@of_user
def last_token(module, args, output):
    def change(hidden):
        hidden = hidden.clone()
        hidden[:, -1] += VECTOR
        return hidden

    return with_hidden(output, change)


@of_user
def single_tokens(module, args, output):
    return with_hidden(output, lambda hidden: hidden + VECTOR * (hidden.shape[1] == 1))


@of_user
def counted_steps(module, args, output):
    def change(hidden):
        module.num_steps = 0 if hidden.shape[1] > 3 else module.num_steps + 1
        return hidden + VECTOR * (module.num_steps % 3)

    return with_hidden(output, change)


@of_user
def evict(module, args, kwargs, output):
    for layer in kwargs[CACHE_NAME].layers:
        if layer.get_seq_length() > 8:
            layer.keys, layer.values = layer.keys[:, :, -8:], layer.values[:, :, -8:]


@of_user
def every_token(module, args, output):
    return with_hidden(output, lambda hidden: hidden + VECTOR / 8)


@of_user
def by_row(vectors, module, args, output):
    return with_hidden(output, lambda hidden: hidden + vectors[:, None])


def add_last_token(target):
    target.model.layers[1].register_forward_hook(last_token)


def add_single_tokens(target):
    target.model.layers[0].mlp.register_forward_hook(single_tokens)


def add_counted_steps(target):
    target.model.layers[0].register_forward_hook(counted_steps)


def add_eviction(target):
    target.register_forward_hook(evict, with_kwargs=True)


def replace_forward(target):
    mlp = target.model.layers[1].mlp
    forward = mlp.forward

    @of_user
    def steered(hidden):
        return forward(hidden) + VECTOR * (hidden.shape[1] == 1)

    mlp.forward = steered


class Wrapper(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden):
        return self.layer(hidden) + VECTOR * (hidden.shape[1] == 1)


def replace_module(target):
    target.model.layers[1].mlp = Wrapper(target.model.layers[1].mlp)


KINDS = {
    "last_token of model.layers.1": add_last_token,
    "single_tokens of model.layers.0.mlp": add_single_tokens,
    "counted_steps of model.layers.0": add_counted_steps,
    "evict of the model": add_eviction,
    "replaced forward .*steered of model.layers.1.mlp": replace_forward,
    "module Wrapper of model.layers.1.mlp": replace_module,
}


def decode(target, inputs, **options):
    stats = hf_speculate.SpeculationStats()
    options = {
        "prompt_lookup_num_tokens": 3,
        "max_new_tokens": NUM_NEW,
        "speculation_stats": stats,
        **options,
    }
    return target.generate(**inputs, **options), stats


@pytest.mark.fallback("plain decoding, because of")
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_hooks_that_count_tokens_get_the_plain_text(name, num_rows, monkeypatch):
    monkeypatch.setattr(Wrapper, "__module__", "__main__")
    (target, draft), inputs = (
        new_pair("llama"),
        ragged_prompts(num_rows, seed=2, min_len=9, max_len=12),
    )
    KINDS[name](target)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    for options in (
        {"assistant_model": draft, "num_assistant_tokens": 2},
        {"prompt_lookup_num_tokens": 3},
    ):
        options = {"prompt_lookup_num_tokens": None, **options}
        with pytest.warns(
            UserWarning, match=f"plain decoding, because of the .*{name}: "
        ) as warned:
            ours, stats = decode(target, inputs, **options)
        assert_equal_ids(plain, ours)
        assert [str(warning.message) for warning in warned] == stats.fallbacks


@pytest.mark.fallback("may read or edit its layers", "plain decoding, because of")
def test_hook_on_every_token_is_compared_once():
    (target, draft), inputs = new_pair("llama"), ragged_prompts(2, seed=2)
    forwards = []
    target.register_forward_pre_hook(lambda *_: forwards.append(1))
    target.model.layers[0].register_forward_hook(every_token)
    plain, nums = target.generate(**inputs, max_new_tokens=NUM_NEW), []
    for _ in range(2):
        forwards.clear()
        ours, stats = decode(
            target,
            inputs,
            assistant_model=draft,
            num_assistant_tokens=3,
            prompt_lookup_num_tokens=None,
        )
        assert_equal_ids(plain, ours)
        assert stats.num_accepted > 0
        nums.append(len(forwards))
    assert nums[0] > nums[1] == 1 + stats.num_batch_rounds
    target.model.layers[1].register_forward_hook(last_token)
    with pytest.warns(UserWarning, match="plain decoding, because of .*every_token .*last_token "):
        decode(target, inputs)


@pytest.mark.fallback("may read or edit its layers", "speculation_hooks is")
def test_hooks_setting_is_followed():
    (target, _), inputs = new_pair("llama"), ragged_prompts(1, seed=2)
    target.model.layers[0].register_forward_hook(every_token)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    forwards = []
    target.register_forward_pre_hook(lambda *_: forwards.append(1))
    ours, stats = decode(target, inputs, speculation_hooks="trusted")
    assert_equal_ids(plain, ours)
    assert len(forwards) == 1 + stats.num_batch_rounds
    with pytest.warns(
        UserWarning, match='every_token of model.layers.0: speculation_hooks is "plain"'
    ):
        ours, stats = decode(
            target, inputs, generation_config=GenerationConfig(speculation_hooks="plain")
        )
    assert_equal_ids(plain, ours)
    assert not stats.num_batch_rounds


@pytest.mark.fallback("may read or edit its layers")
@pytest.mark.parametrize("choice", ["check", "trusted"])
def test_rows_stay_with_a_hook_holding_a_vector_per_row(choice):
    (target, draft), inputs = new_pair("llama"), ragged_prompts(3, seed=2)
    vectors = torch.stack([VECTOR / 8, -VECTOR / 8, VECTOR / 16])
    target.model.layers[0].register_forward_hook(partial(by_row, vectors))
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)
    # The first row ends before the others.
    options = {"eos_token_id": int(text[0, -8]), "max_new_tokens": NUM_NEW}
    plain = target.generate(**inputs, **options)
    options |= {
        "assistant_model": draft,
        "num_assistant_tokens": 2,
        "prompt_lookup_num_tokens": None,
    }
    ours, stats = decode(target, inputs, speculation_hooks=choice, **options)
    assert_equal_ids(plain, ours)
    assert stats.num_accepted > 0
    prompts = iter([RowPrompt([1, 2, 3])])
    decoder = ContinuousDecoder(
        target, 2, {"prompt_lookup_num_tokens": 3, "speculation_hooks": choice}
    )
    with pytest.raises(UnsupportedGenerationError, match="got hooks of the target may hold"):
        list(decoder.decode(lambda: next(prompts, None)))


@pytest.mark.fallback("may read or edit its layers")
@pytest.mark.parametrize("cache", ["auto", "preallocated"])
def test_shortened_layer_is_named(cache):
    (target, _), inputs = new_pair("llama"), ragged_prompts(1, seed=2, min_len=40, max_len=40)
    add_eviction(target)
    with pytest.raises(
        UnsupportedModelError,
        match=r"got 8 of 4[014] in layer 0 of .* forward hook evict of the model",
    ):
        decode(target, inputs, speculation_hooks="trusted", speculation_cache=cache)


@pytest.mark.fallback("plain decoding, because of")
@pytest.mark.filterwarnings("ignore:plain decoding, because of")
def test_plain_calls_keep_seeds_outputs_and_streamers():
    (target, _), inputs = new_pair("llama"), ragged_prompts(1, seed=2)
    add_single_tokens(target)
    sampled = {"do_sample": True, "seed": 5}
    first, _ = decode(target, inputs, **sampled)
    state = torch.get_rng_state()
    assert_equal_ids(first, decode(target, inputs, **sampled)[0])
    assert torch.equal(state, torch.get_rng_state())
    streamer = Streamed()
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": NUM_NEW}
    ours, stats = decode(
        target, inputs, streamer=streamer, cache_implementation="static", **options
    )
    plain = target.generate(**inputs, **options)
    assert_equal_ids(plain.sequences, ours.sequences)
    assert all(map(torch.equal, plain.logits, ours.logits))
    assert streamer.has_ended and streamer.ids == ours.sequences[0].tolist()
    assert ours.speculation is stats


@pytest.mark.fallback("may read or edit its layers", "plain decoding, because of")
@pytest.mark.filterwarnings("ignore:plain decoding, because of")
def test_coupled_calls_draw_the_text_without_a_draft():
    (target, draft), inputs = new_pair("llama"), ragged_prompts(2, seed=2)
    add_single_tokens(target)
    options = {"do_sample": True, "verifier": "coupled", "seed": 7, "max_new_tokens": NUM_NEW}
    alone = target.generate(**inputs, **options)
    ours, _ = decode(
        target, inputs, assistant_model=draft, prompt_lookup_num_tokens=None, **options
    )
    assert_equal_ids(alone, ours)


def test_hooks_of_known_packages_are_served_without_a_comparison():
    accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")
    (target, draft), inputs = new_pair("llama"), ragged_prompts(2, seed=2)
    accelerate.hooks.add_hook_to_module(target.model.layers[0], accelerate.hooks.ModelHook())
    target = peft.get_peft_model(target, peft.LoraConfig(r=2, init_lora_weights=False)).eval()
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    forwards = []
    target.base_model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    stats = hf_speculate.SpeculationStats()
    options = {"assistant_model": draft, "num_assistant_tokens": 3, "speculation_stats": stats}
    assert_equal_ids(plain, target.generate(**inputs, max_new_tokens=NUM_NEW, **options))
    assert len(forwards) == 1 + stats.num_batch_rounds


class Racing:
    """A hook that lets another thread add and remove hooks whenever it is looked at."""

    def __init__(self, module):
        self.module = module

    def __call__(self, *args):
        pass

    def __getattribute__(self, name):
        module = object.__getattribute__(self, "module")
        module.register_forward_hook(print).remove()
        module.register_forward_pre_hook(print).remove()
        return object.__getattribute__(self, name)


@pytest.mark.parametrize(
    "walk", [foreign_code, adapters_by_row, forward_hook_ids, has_hooks_of_others]
)
def test_hooks_of_other_threads_may_change_during_a_walk(walk):
    module = new_pair("llama", 0.1)[0].model.layers[0]
    for _ in range(2):
        module.register_forward_hook(Racing(module))
        module.register_forward_pre_hook(Racing(module))
    walk(module)


def test_activated_adapters_are_refused_by_name():
    peft = pytest.importorskip("peft")
    target, draft = new_pair("llama")
    config = peft.LoraConfig(
        r=2,
        task_type="CAUSAL_LM",
        alora_invocation_tokens=[5, 6],
        target_modules=["q_proj"],
        init_lora_weights=False,
    )
    target, ids = peft.get_peft_model(target, config).eval(), torch.tensor([[1, 2, 5, 6, 3]])
    with pytest.raises(UnsupportedModelError, match=r"activated LoRA \(aLoRA\)"):
        target.generate(input_ids=ids, assistant_model=draft, max_new_tokens=NUM_NEW)
    with target.disable_adapter():
        assert (
            target.generate(input_ids=ids, assistant_model=draft, max_new_tokens=NUM_NEW).shape[1]
            == 5 + NUM_NEW
        )
