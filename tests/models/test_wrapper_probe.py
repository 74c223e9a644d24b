"""Test the probe for wrapped text decoders, which runs on a copy without weights."""

import logging

import pytest
import torch
from transformers import LlavaForConditionalGeneration

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.models.quirks import is_tested_type
from hf_speculate.models.text_decoder import makes_causal_masks, text_decoder
from hf_speculate.models.wrapper_probe import HandedOn, find_handed_on
from tests.cases import assert_decodes_as_plain
from tests.support.tiny import make_model, noisy_copy, ragged_prompts
from tests.support.tiny_encoders import IMAGE_TOKEN_ID, TEXT, VISION, make, make_llava, text_draft

NUM_NEW = 12
INPUTS = ragged_prompts(3, seed=3, vocab_size=60)


def whole(
    self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **options
):
    options |= {CACHE_NAME: past_key_values} if past_key_values is not None else {}
    return LlavaForConditionalGeneration.forward(
        self, input_ids, attention_mask=attention_mask, position_ids=position_ids, **options
    )


def unnamed(self, input_ids=None, attention_mask=None, past_key_values=None, **options):
    return whole(self, input_ids, attention_mask, past_key_values=past_key_values, **options)


def without_positions(self, input_ids=None, attention_mask=None, past_key_values=None, **options):
    options.pop("position_ids", None)
    return whole(self, input_ids, attention_mask, past_key_values=past_key_values, **options)


def other_mask(
    self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **options
):
    attention_mask = attention_mask.clone() if attention_mask is not None else None
    return whole(self, input_ids, attention_mask, position_ids, past_key_values, **options)


def flat_mask(
    self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **options
):
    if attention_mask is not None and attention_mask.ndim > 2:
        raise ValueError("masks are [B, T]\nand nothing else")
    return whole(self, input_ids, attention_mask, position_ids, past_key_values, **options)


def own_class(forward, made=None):
    """Make a class outside transformers that appends to `made` whenever an instance is created."""

    def init(self, config):
        LlavaForConditionalGeneration.__init__(self, config)
        made.append(self.model.language_model.config.num_hidden_layers)

    body = {"forward": forward, "__module__": __name__} | (
        {} if made is None else {"__init__": init}
    )
    return type("Own", (LlavaForConditionalGeneration,), body)


def own_target(forward, made=None):
    target = make_llava()
    target.__class__ = own_class(forward, made)
    return target


FAILED = "ValueError: masks are [B, T]"
NO_POSITIONS = "lock step, because Own takes no positions but counts columns"
DYNAMIC = "target cache: dynamic, because"
CASES = {
    whole: (HandedOn(), []),
    unnamed: (HandedOn(), []),
    without_positions: (
        HandedOn(positions=False),
        [NO_POSITIONS, f"{DYNAMIC} Own hands other positions on to its text decoder"],
    ),
    other_mask: (
        HandedOn(mask=False),
        [f"{DYNAMIC} Own hands another mask on to its text decoder"],
    ),
    flat_mask: (HandedOn(False, True, FAILED), [f"{DYNAMIC} a probe of Own failed ({FAILED})"]),
}


def test_wrapper_of_tested_type_is_probed():
    target = own_target(without_positions)
    type(target).__module__ = LlavaForConditionalGeneration.__module__
    assert is_tested_type(target)
    assert find_handed_on(target) == HandedOn(positions=False)


@pytest.mark.fallback("lock step", "cache: dynamic")
@pytest.mark.parametrize("forward", CASES, ids=lambda forward: forward.__name__)
def test_unknown_wrapper_decodes_by_its_forwarded_arguments(forward, caplog):
    caplog.set_level(logging.INFO, "hf_speculate")
    expected, fallbacks = CASES[forward]
    models = []
    target = own_target(forward, models)
    draft = text_draft(target)
    assert find_handed_on(target) == expected
    hf_speculate.enable(target)
    num_models = len(models)
    for _ in range(2):
        stats = assert_decodes_as_plain(
            target, draft, INPUTS, max_new_tokens=NUM_NEW, num_assistant_tokens=3
        )
        assert stats.fallbacks == fallbacks
        assert stats.cache == ("dynamic" if fallbacks else "preallocated")
        assert stats.lock_step == (not expected.positions)
    assert len(models) == 2 * num_models  # the two calls share one probe
    assert sum("the target cache of Own is dynamic: " in text for text in caplog.messages) == bool(
        fallbacks
    )
    assert models[0] == 1  # the copy has one of two layers


def test_wrapper_with_one_mask_for_two_layer_types_passes():
    """Use PaliGemma 2, because its text decoder takes one mask per layer type."""
    vision = {
        "model_type": "siglip_vision_model",
        **VISION,
        "patch_size": 4,
        "vision_use_head": False,
    }
    text = {"model_type": "gemma2", **TEXT, "head_dim": 8, "query_pre_attn_scalar": 8}
    own = {
        "vision_config": vision,
        "text_config": text,
        "image_token_index": IMAGE_TOKEN_ID,
        "projection_dim": 32,
    }
    target = make("PaliGemmaForConditionalGeneration", **own)
    assert find_handed_on(target) == HandedOn(mask=False)


def test_probe_changes_neither_model_nor_random_state():
    target = own_target(whole)

    def fail(*_):
        raise AssertionError("a module of the user's model ran")

    for module in target.modules():
        module.register_forward_pre_hook(fail)
    before, config = torch.get_rng_state(), target.config.to_dict()
    assert find_handed_on(target) == HandedOn()
    assert torch.equal(torch.get_rng_state(), before)
    assert target.config.to_dict() == config
    assert not any(weight.is_meta for weight in target.parameters())


def test_wrapper_not_built_from_its_config_reports_the_reason():
    target = own_target(whole)

    def init(self, config, tokenizer):
        raise AssertionError("never called with a config alone")

    type(target).__init__ = init
    handed_on = find_handed_on(target)
    assert not handed_on.mask
    assert handed_on.failure.startswith("TypeError: ")
    assert "tokenizer" in handed_on.failure


def test_models_without_wrapper_are_not_probed():
    def init(*_):
        raise AssertionError("a copy was made")

    for model in (make_model("llama"), make_model("gpt2")):
        known = type(model)
        model.__class__ = type(
            "Known", (known,), {"__module__": known.__module__, "__init__": init}
        )
        assert find_handed_on(model) == HandedOn()


def test_text_decoder_is_the_innermost_model():
    llava, llama = make_llava(), make_model("llama")
    assert text_decoder(llava) is llava.model.language_model
    assert text_decoder(llama) is llama.model
    decoder = llama.model
    decoder.__class__ = type("Mine", (type(decoder),), {"__module__": __name__})
    assert makes_causal_masks(decoder)
    hf_speculate.enable(llama)
    stats = assert_decodes_as_plain(
        llama, noisy_copy(make_model("llama")), INPUTS, max_new_tokens=NUM_NEW
    )
    assert (stats.cache, stats.fallbacks) == ("preallocated", [])
    assert HandedOn.of(llama) == HandedOn()
