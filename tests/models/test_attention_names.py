"""Check whose configs name our attention during a call, and which names are restored."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_speculate
from hf_speculate.models.attention_names import FOLDED, folded_attention_for
from hf_speculate.models.folded_attention import STANDS_FOR
from tests.cases import assert_decodes_as_plain, each_value, new_pair
from tests.support.flash import NAMES, flash_attention, set_flash
from tests.support.tiny import make_config, make_model, ragged_prompts
from tests.support.tiny_encoders import make_llava


def name_in(model) -> str:
    return model.config._attn_implementation


def test_attention_name_is_restored_after_an_error():
    model = make_model("llama")
    before = dict(vars(model.config))
    with pytest.raises(KeyboardInterrupt), folded_attention_for([model]):
        assert vars(model.config) == {**before, "_attn_implementation_internal": FOLDED}
        raise KeyboardInterrupt
    assert vars(model.config) == before
    with folded_attention_for([model]):
        model.set_attn_implementation("eager")
    assert name_in(model) == "eager"


def test_attention_name_is_restored_by_the_last_of_several_calls():
    llama, qwen = make_model("llama"), make_model("qwen2")
    first, second, third = (
        folded_attention_for(models) for models in ([llama, llama], [llama, qwen], [qwen])
    )
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (name_in(llama), name_in(qwen)) == (FOLDED, FOLDED)
    third.__enter__()
    second.__exit__(None, None, None)
    assert (name_in(llama), name_in(qwen)) == (STANDS_FOR, FOLDED)
    third.__exit__(None, None, None)
    assert (name_in(llama), name_in(qwen)) == (STANDS_FOR, STANDS_FOR)


def test_interrupted_setup_leaves_no_attention_name():
    models = [make_model("llama"), make_model("llama")]
    written = []

    def interrupted(config, name, value):
        vars(config)[name] = value
        written.append(value)
        if value == FOLDED:
            raise KeyboardInterrupt

    models[1].config.__class__ = type(
        "InterruptedConfig", (LlamaConfig,), {"__setattr__": interrupted}
    )
    with pytest.raises(KeyboardInterrupt), folded_attention_for(models):
        pass
    assert written == [FOLDED, STANDS_FOR]
    assert [name_in(model) for model in models] == [STANDS_FOR] * 2


class ComparesName(LlamaForCausalLM):
    """Model whose code compares attention names, as in Gemma 4."""

    def forward(self, *args, **kwargs):
        self.is_known = self.config._attn_implementation in ("eager", "sdpa")
        return super().forward(*args, **kwargs)


def test_model_comparing_attention_names_is_not_folded():
    model = ComparesName(make_config("llama"))
    with folded_attention_for([model]):
        assert name_in(model) == STANDS_FOR


def test_frozen_config_is_not_changed():
    def refuse(config, name, value):
        raise AttributeError(f"cannot assign to field {name!r}")

    model = make_model("llama")
    model.config.__class__ = type("FrozenConfig", (LlamaConfig,), {"__setattr__": refuse})
    with folded_attention_for([model]):
        assert name_in(model) == STANDS_FOR


def test_nested_config_changes_for_grouped_layers_only():
    model = make_llava()
    with folded_attention_for([model]):
        assert model.config.text_config._attn_implementation == FOLDED
        assert name_in(model) == model.config.vision_config._attn_implementation == STANDS_FOR
    assert model.config.text_config._attn_implementation == STANDS_FOR


def test_model_copies_are_independent():
    model = make_model("llama")
    with folded_attention_for([model]):
        copied = copy.deepcopy(model)
    for other in (copied, copy.deepcopy(model)):
        with folded_attention_for([other]):
            assert (name_in(other), name_in(model)) == (FOLDED, STANDS_FOR)
        assert (name_in(other), name_in(model)) == (STANDS_FOR, STANDS_FOR)


OPTIONS = {"num_assistant_tokens": 4, "max_new_tokens": 12}


def flash_pair(family: str, name: str = NAMES[0]):
    return [set_flash(model, name) for model in new_pair(family, 0.1)]


# a mask for each type of layer in Cohere 2, and one with a window in Mistral
@each_value(
    name=NAMES, family=["llama", "cohere2", "mistral_window"], batch_size=[1, 3], chunk=[None, 3]
)
def test_flash_attention_runs_on_preallocated_buffers(name, family, batch_size, chunk):
    target, draft = flash_pair(family, name)
    inputs = ragged_prompts(batch_size, seed=2)
    with flash_attention() as calls:
        stats = assert_decodes_as_plain(target, draft, inputs, **OPTIONS, prefill_chunk_size=chunk)
    assert stats.cache == "preallocated" and stats.num_accepted
    assert {call.name for call in calls} == {name_in(target)} == {name_in(draft)} == {name}


def test_concurrent_plain_call_attends_as_alone():
    target, draft = flash_pair("llama")
    others, logits, nested = ragged_prompts(3, seed=5), [], []

    def plain():
        before = len(calls)
        output = target.generate(
            **others, max_new_tokens=6, output_logits=True, return_dict_in_generate=True
        )
        logits.append(torch.stack(output.logits))
        nested.append(calls[before:])

    with flash_attention() as calls:
        plain()
        options = {**ragged_prompts(2, seed=2), **OPTIONS}
        target.generate(
            **options, assistant_model=draft, speculation_callback=lambda report: plain()
        )
    assert len(logits) > 2 and all(torch.equal(logits[0], others) for others in logits)
    assert nested[0] and nested == nested[:1] * len(nested)


class OwnLlama(LlamaForCausalLM):
    """Model outside transformers, whose code we have not read."""


def with_softcaps():
    model = make_model("llama")
    model.config.attn_logit_softcapping = 5.0
    return model


def without_sdpa():
    model = make_model("llama")
    model.model._supports_sdpa = False
    return model


def frozen():
    class FrozenConfig(LlamaConfig):
        def __setattr__(self, name, value):
            if name == "_attn_implementation_internal" and "is_frozen" in vars(self):
                raise AttributeError(f"cannot assign to field {name!r}")
            super().__setattr__(name, value)

    model = set_flash(make_model("llama"), NAMES[0])
    model.config.__class__, model.config.is_frozen = FrozenConfig, True
    return model


@pytest.mark.fallback("its attention is flash_attention_2, and ")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_softcaps, "SDPA lacks what the attention of LlamaModel needs"),
        (without_sdpa, "SDPA lacks what the attention of LlamaModel needs"),
        (lambda: OwnLlama(make_config("llama")).double().eval(), "may compare that name"),
        (frozen, "its config is frozen"),
    ],
)
def test_flash_attention_that_sdpa_cannot_replace_keeps_the_dynamic_cache(make, reason):
    target = make()
    if name_in(target) != NAMES[0]:
        set_flash(target, NAMES[0])
    target = hf_speculate.enable(target)
    options = {**OPTIONS, "prompt_lookup_num_tokens": 3}
    with flash_attention() as calls:
        stats = assert_decodes_as_plain(target, None, ragged_prompts(1, seed=3), **options)
    assert stats.cache == "dynamic"
    assert any(reason in fallback for fallback in stats.fallbacks)
    assert {call.name for call in calls} == {NAMES[0]}
