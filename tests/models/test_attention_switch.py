"""Configs hold the folded attention's name while a call needs it, and exactly what they held before after the last."""

import copy

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hf_speculate.models.folded_attention import FOLDED, STANDS_FOR, folded_attention_for
from tests.tiny import make_config, make_model
from tests.tiny_encoders import make_llava


def name_in(model) -> str:
    return model.config._attn_implementation


def test_the_name_is_held_inside_and_restored_after_an_error_but_not_over_what_the_user_set():
    model = make_model("llama")
    before = dict(vars(model.config))
    with pytest.raises(KeyboardInterrupt), folded_attention_for([model]):
        assert vars(model.config) == {**before, "_attn_implementation_internal": FOLDED}
        raise KeyboardInterrupt
    assert vars(model.config) == before
    with folded_attention_for([model]):
        model.set_attn_implementation("eager")
    assert name_in(model) == "eager"


def test_the_last_of_several_calls_restores_the_name():
    one, other = make_model("llama"), make_model("qwen2")
    first, second, third = (folded_attention_for(models) for models in ([one, one], [one, other], [other]))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (name_in(one), name_in(other)) == (FOLDED, FOLDED)
    third.__enter__()
    second.__exit__(None, None, None)
    assert (name_in(one), name_in(other)) == (STANDS_FOR, FOLDED)
    third.__exit__(None, None, None)
    assert (name_in(one), name_in(other)) == (STANDS_FOR, STANDS_FOR)


def test_an_interrupt_while_names_are_written_leaves_none():
    models = [make_model("llama"), make_model("llama")]
    written = []

    def interrupted(config, name, value):
        vars(config)[name] = value
        written.append(value)
        if value == FOLDED:
            raise KeyboardInterrupt

    models[1].config.__class__ = type("InterruptedConfig", (LlamaConfig,), {"__setattr__": interrupted})
    with pytest.raises(KeyboardInterrupt), folded_attention_for(models):
        pass
    assert written == [FOLDED, STANDS_FOR]
    assert [name_in(model) for model in models] == [STANDS_FOR] * 2


class ComparesName(LlamaForCausalLM):
    """As Gemma 4 and models with sparse indexers do."""

    def forward(self, *args, **kwargs):
        self.is_known = self.config._attn_implementation in ("eager", "sdpa")
        return super().forward(*args, **kwargs)


def test_a_model_whose_code_compares_the_name_is_left_alone():
    model = ComparesName(make_config("llama"))
    with folded_attention_for([model]):
        assert name_in(model) == STANDS_FOR


def test_a_frozen_config_is_left_alone():
    def refuse(config, name, value):
        raise AttributeError(f"cannot assign to field {name!r}")

    model = make_model("llama")
    model.config.__class__ = type("FrozenConfig", (LlamaConfig,), {"__setattr__": refuse})
    with folded_attention_for([model]):
        assert name_in(model) == STANDS_FOR


def test_only_the_config_of_the_grouped_layers_changes_in_a_nested_one():
    model = make_llava()
    with folded_attention_for([model]):
        assert model.config.text_config._attn_implementation == FOLDED
        assert name_in(model) == model.config.vision_config._attn_implementation == STANDS_FOR
    assert model.config.text_config._attn_implementation == STANDS_FOR


def test_copies_are_models_of_their_own():
    model = make_model("llama")
    with folded_attention_for([model]):
        held = copy.deepcopy(model)
    for twin in (held, copy.deepcopy(model)):
        with folded_attention_for([twin]):
            assert (name_in(twin), name_in(model)) == (FOLDED, STANDS_FOR)
        assert (name_in(twin), name_in(model)) == (STANDS_FOR, STANDS_FOR)
