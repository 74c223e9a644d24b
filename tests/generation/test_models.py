"""Kinds of decoder-only models beyond those of every test: greedy text equals plain `generate`, past their windows."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, MoshiConfig, MoshiForCausalLM

import hf_speculate
from hf_speculate.errors import UnsupportedModelError
from tests.cases import assert_decodes_as_plain, assert_equal_ids, pair
from tests.tiny import INITIALIZER_RANGE, MORE_KINDS, SLIDING_WINDOW, noisy_copy, ragged_prompts
from tests.tiny_recurrent import UNSUPPORTED_RECURRENT, unsupported_config

NUM_NEW = 3 * SLIDING_WINDOW  # past the window or chunk of the models that have one
DYNAMIC_ONLY = ("falcon_alibi", "gpt_neo", "llama4", "mpt")


@pytest.mark.parametrize("kind", MORE_KINDS)
@pytest.mark.parametrize("cache_kind", ["auto", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_greedy_equals_plain(kind, cache_kind):
    # MPT fills what it masks with the lowest float64 and takes the softmax in float32, where padding becomes NaN.
    models = pair(kind, dtype=torch.float32 if kind == "mpt" else torch.float64)
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": 3, "speculation_cache": cache_kind}
    stats = assert_decodes_as_plain(*models, ragged_prompts(3, seed=3), **options)
    assert 0 < stats.num_accepted < stats.num_verified
    assert stats.cache == ("dynamic" if cache_kind == "dynamic" or kind in DYNAMIC_ONLY else "preallocated")
    assert not stats.lock_step


@pytest.mark.parametrize("kind", UNSUPPORTED_RECURRENT)
def test_models_that_keep_recurrent_states_elsewhere_are_refused_by_name(kind):
    model = AutoModelForCausalLM.from_config(unsupported_config(kind))

    def run(*_):
        raise AssertionError("a model ran before the refusal")

    model.register_forward_pre_hook(run)
    target, draft = pair("llama")
    for one, other in ((model, draft), (target, model)):
        with pytest.raises(UnsupportedModelError, match=f"got {type(model).__name__} with recurrent state"):
            hf_speculate.generate(one, **ragged_prompts(1, seed=1), assistant_model=other, max_new_tokens=4)
    assert torch.is_grad_enabled()


def test_window_layers_that_read_all_that_a_cache_holds_get_buffers_with_masks():
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = MoshiConfig(
        vocab_size=64, sliding_window=SLIDING_WINDOW, pad_token_id=0, initializer_range=INITIALIZER_RANGE, **sizes
    )
    model = MoshiForCausalLM(config).to(torch.float64).eval().requires_grad_(False)
    model.generation_config = GenerationConfig(pad_token_id=0)
    inputs = ragged_prompts(3, seed=3)
    plain = model.generate(**inputs, max_new_tokens=NUM_NEW)
    options = {"assistant_model": noisy_copy(model), "num_assistant_tokens": 3, "max_new_tokens": NUM_NEW}
    hf_speculate.enable(model)
    assert_equal_ids(plain, model.generate(**inputs, **options))
    with pytest.raises(UnsupportedModelError, match="must be preallocated, for its window layers read all"):
        model.generate(**inputs, **options, speculation_cache="dynamic")
    with pytest.raises(UnsupportedModelError, match="must be preallocated, for its window layers read all"):
        model.generate(**inputs, **options, past_key_values=DynamicCache(config=config))
