"""Test images, audio, types and positions that a decoder or an encoder reads with the prompt."""

from functools import cache

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import (
    DRAFT_NOISE,
    assert_decodes_as_plain,
    assert_equal_ids,
    each_value,
    pair,
    plain_and_ours,
)
from tests.reliability.faults import Fault, FaultyCriterion
from tests.reliability.test_threads import together
from tests.support.tiny import make_model, noisy_copy, ragged_prompts
from tests.support.tiny_encoders import (
    make_llava,
    make_qwen2_vl,
    make_qwen3_5_vl,
    picture_prompts,
    text_draft,
)
from tests.support.tiny_readers import ENCODERS, READERS, READINGS
from tests.support.tiny_wrappers import WRAPPERS

NUM_NEW = 24
LITTLE_NOISE = 0.01  # a draft may not have read all inputs of the target
KEEPS_PICTURES = "because its cache would hold the states of pictures too"  # refers to the draft
# Two kinds of masks, positions with three axes, positions that the forward does not take, and
# neither. The other models are slow.
VARIED = ("cohere2_vision", "glm46v", "moss_transcribe_diarize", "voxtral")
MAKERS = {"llava": make_llava, "qwen2_vl": make_qwen2_vl, "qwen3_5": make_qwen3_5_vl}


@cache
def picture_pair(family):
    """Return an enabled target and a text-only draft. Tests share them: change neither."""
    target = hf_speculate.enable(MAKERS[family]())
    return target, text_draft(target)


@each_value(cache_kind=["auto", "dynamic"], family=[*MAKERS, *MAKERS], batch_size=[1, 3])
def test_image_models_decode_as_plain(family, batch_size, cache_kind):
    target, draft = picture_pair(family)
    inputs, options = picture_prompts(target, batch_size), {"max_new_tokens": NUM_NEW}
    stats = assert_decodes_as_plain(target, draft, inputs, **options, speculation_cache=cache_kind)
    assert 0 < stats.num_accepted < stats.num_verified
    blind = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    # The model has read the image.
    assert not torch.equal(*(target.generate(**some, **options) for some in (inputs, blind)))


def test_videos_decode_as_plain():
    target, draft = picture_pair("qwen2_vl")
    inputs, config = picture_prompts(target, 2), target.config
    ids = inputs["input_ids"].masked_fill(
        inputs["input_ids"] == config.image_token_id, config.video_token_id
    )
    text = {"input_ids": ids, "attention_mask": inputs["attention_mask"]}
    video = {
        "pixel_values_videos": inputs["pixel_values"],
        "video_grid_thw": inputs["image_grid_thw"],
    }
    video["mm_token_type_ids"] = 2 * inputs["mm_token_type_ids"]
    assert_decodes_as_plain(target, draft, {**text, **video}, max_new_tokens=NUM_NEW)
    assert not torch.equal(
        *(target.generate(**text, **more, max_new_tokens=NUM_NEW) for more in (video, {}))
    )


@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [({"vision_feature_layer": -1}, 4), ({"vision_feature_select_strategy": "full"}, 5)],
)
def test_feature_options_of_the_call_are_followed(options, num_tokens):
    target, draft = picture_pair("llava")
    pictures = picture_prompts(target, 1)
    image = [target.config.image_token_id] * num_tokens
    inputs = {
        "input_ids": torch.tensor([[3, 62, *image, 63, 8]]),
        "pixel_values": pictures["pixel_values"],
    }
    plain, ours = plain_and_ours(target, draft, {**inputs, **options}, max_new_tokens=NUM_NEW)
    assert_equal_ids(plain, ours)
    if num_tokens == 4:  # otherwise the default cannot read the prompt
        assert not torch.equal(target.generate(**inputs, max_new_tokens=NUM_NEW), ours)


def decode(model, inputs, **options):
    torch.manual_seed(0)  # some models draw noise
    options |= {"max_new_tokens": NUM_NEW, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **options)


@pytest.mark.fallback("lock step", KEEPS_PICTURES)
@pytest.mark.parametrize("name", [*READERS, *READINGS])
def test_multimodal_model_decodes_as_plain(name):
    target, inputs, reading = (READERS | READINGS)[name]()
    draft = noisy_copy(target, LITTLE_NOISE) if name in READERS else text_draft(target)
    plain = decode(target, inputs)
    hf_speculate.enable(target)
    options = {"assistant_model": draft, "num_assistant_tokens": 3}
    ours = decode(target, inputs, **options)
    assert_equal_ids(plain.sequences, ours.sequences)
    for layer, expected in zip(ours[CACHE_NAME].layers, plain[CACHE_NAME].layers, strict=True):
        assert torch.allclose(layer.keys, expected.keys)
        assert torch.allclose(layer.values, expected.values)
    stats = ours.speculation
    assert stats.num_accepted > 0
    assert not stats.lock_step
    # The cache contains images.
    assert stats.cache == ("dynamic" if name == "aspect_ratio_ids" else "preallocated")
    if reading is not None:  # otherwise, the argument has only one valid value
        assert not torch.equal(
            decode(target, {**inputs, name: reading}, **options).sequences, ours.sequences
        )


# In older versions, a static cache gives image layers the length of the text, and fails.
HAS_STATIC = "_prepare_static_cache" in vars(transformers.MllamaForConditionalGeneration)


def assert_same_layers(one, other):
    for layer, expected in zip(one.layers, other.layers, strict=True):
        assert type(layer) is type(expected)
        assert int(layer.get_seq_length()) == int(expected.get_seq_length())
        torch.testing.assert_close(layer.keys, expected.keys)
        torch.testing.assert_close(layer.values, expected.values)


@pytest.mark.fallback(KEEPS_PICTURES)
@pytest.mark.skipif(not HAS_STATIC, reason="transformers' own static cache fails")
def test_cross_layers_outside_a_cut_config_are_ignored():
    target, inputs, _ = READERS["aspect_ratio_ids"]()
    target.config.text_config.cross_attention_layers = [1, 9]  # the model has three layers
    drafts = {"assistant_model": noisy_copy(target, LITTLE_NOISE), "num_assistant_tokens": 3}
    plain = decode(target, inputs, max_cache_len=96).sequences
    ours = decode(
        hf_speculate.enable(target),
        inputs,
        cache_implementation="static",
        max_cache_len=96,
        **drafts,
    )
    assert_equal_ids(plain, ours.sequences)


@pytest.mark.fallback(KEEPS_PICTURES)
@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize(
    "family",
    ["dynamic", pytest.param("static", marks=[] if HAS_STATIC else pytest.mark.xfail(strict=True))],
)
def test_cross_attention_layers_keep_their_length_in_next_turn(family, has_mask):
    target, inputs, _ = READERS["aspect_ratio_ids"]()
    if not has_mask:  # without the mask, all new tokens see all tiles, and the prompt does not
        del inputs["cross_attention_mask"]
    hf_speculate.enable(target)
    draft, texts, caches = noisy_copy(target, LITTLE_NOISE), [], []
    for draft_options in ({}, {"assistant_model": draft, "num_assistant_tokens": 3}):
        first = decode(
            target, inputs, cache_implementation=family, max_cache_len=96, **draft_options
        )
        ids = torch.cat([first.sequences, torch.tensor([[9, 8], [7, 6]])], dim=1)
        mask = torch.cat(
            [inputs["attention_mask"], torch.ones(2, NUM_NEW + 2, dtype=torch.int64)], dim=1
        )
        options = {"attention_mask": mask, CACHE_NAME: first[CACHE_NAME], "max_new_tokens": NUM_NEW}
        if has_mask:
            options["cross_attention_mask"] = torch.ones(*ids.shape, 1, 2, dtype=torch.int64)
        texts.append(target.generate(ids, **options, **draft_options))
        caches.append(first[CACHE_NAME])
    assert_equal_ids(*texts)
    assert_same_layers(*caches)
    # two tiles, each with four patches and a class token
    assert caches[0].layers[1].keys.shape[2] == 10


def test_static_layer_too_short_for_pictures_is_named():
    target, inputs, _ = READERS["aspect_ratio_ids"]()
    cache = StaticCache(config=target.config.get_text_config(), max_cache_len=64)
    cache.layers[1] = StaticLayer(max_cache_len=6)
    with pytest.raises(
        UnsupportedGenerationError,
        match=r"must have room for its states, got 6 columns for 10; leave",
    ):
        hf_speculate.generate(
            target, **inputs, prompt_lookup_num_tokens=3, max_new_tokens=8, **{CACHE_NAME: cache}
        )
    assert not any(layer.is_initialized for layer in cache.layers)


@pytest.mark.parametrize(
    "name",
    [name if name in VARIED else pytest.param(name, marks=pytest.mark.slow) for name in WRAPPERS],
)
def test_text_decoder_wrapper_uses_preallocated_buffers(name):
    target, inputs, _ = WRAPPERS[name].make()
    draft, plain = noisy_copy(target, DRAFT_NOISE), decode(target, inputs)
    blind = decode(target, {name: inputs[name] for name in ("input_ids", "attention_mask")})
    # the model has read the image or audio
    assert not torch.equal(plain.logits[0], blind.logits[0])
    hf_speculate.enable(target)
    ours = decode(target, inputs, assistant_model=draft, num_assistant_tokens=3)
    assert_equal_ids(plain.sequences, ours.sequences)
    for layer, expected in zip(ours[CACHE_NAME].layers, plain[CACHE_NAME].layers, strict=True):
        assert torch.allclose(layer.keys, expected.keys)
        assert torch.allclose(layer.values, expected.values)
    stats = ours.speculation
    assert (stats.cache, stats.lock_step, stats.fallbacks) == ("preallocated", False, [])
    assert 0 < stats.num_accepted < stats.num_verified


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("name", ENCODERS)
def test_extra_encoder_inputs_reach_the_draft(name):
    target, inputs, reading = ENCODERS[name]()
    draft, seen = noisy_copy(target, LITTLE_NOISE), []
    draft.get_encoder().register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    plain = decode(target, inputs)
    hf_speculate.enable(target)
    ours = decode(target, inputs, assistant_model=draft, num_assistant_tokens=3)
    assert_equal_ids(plain.sequences, ours.sequences)
    assert ours.speculation.num_accepted > 0
    assert torch.equal(seen[0][name], inputs[name])
    assert not torch.equal(decode(target, {**inputs, name: reading}).logits[0], plain.logits[0])


@pytest.mark.parametrize("family", MAKERS)
def test_sampled_rows_leave_with_their_positions(family):
    target, draft = picture_pair(family)
    inputs = picture_prompts(target, 2)
    options = {
        "do_sample": True,
        "verifier": "coupled",
        "seed": 7,
        "max_new_tokens": 16,
        "num_return_sequences": 2,
    }
    text = target.generate(**inputs, **options)
    options["eos_token_id"] = [int(text[0, -12]), int(text[2, -6])]
    assert_decodes_as_plain(target, draft, inputs, **options, num_assistant_tokens=3)


def test_second_turn_continues_from_the_cache():
    target, draft = picture_pair("qwen2_vl")
    texts = []
    for draft_options in ({}, {"assistant_model": draft, "num_assistant_tokens": 3}):
        draft_options[CACHE_NAME] = DynamicCache(config=target.config.get_text_config())
        first = target.generate(**picture_prompts(target, 1), **draft_options, max_new_tokens=6)
        more = torch.cat([first, torch.tensor([[9, 8, 7]])], dim=1)
        texts.append(
            target.generate(
                more, attention_mask=torch.ones_like(more), **draft_options, max_new_tokens=NUM_NEW
            )
        )
    assert_equal_ids(*texts)


def test_threads_keep_their_positions_apart():
    target, draft = picture_pair("qwen2_vl")
    calls = [picture_prompts(target, batch_size, seed=batch_size) for batch_size in (1, 2, 3, 2)]
    # Without an image, the position delta differs.
    calls[3] = {name: calls[3][name] for name in ("input_ids", "attention_mask")}
    draft_options = {"assistant_model": draft, "num_assistant_tokens": 3, "max_new_tokens": 12}
    wanted = [target.generate(**inputs, max_new_tokens=12) for inputs in calls]
    outputs = together(
        *(lambda _, inputs=inputs: target.generate(**inputs, **draft_options) for inputs in calls)
    )
    for plain, ours in zip(wanted, outputs, strict=True):
        assert_equal_ids(plain, ours)


@pytest.mark.fallback("lock step")
def test_failed_run_leaves_the_model_as_plain_generate():
    target, draft = picture_pair("qwen2_vl")
    left = []
    for draft_options in ({}, {"assistant_model": draft, "num_assistant_tokens": 3}):
        target.generate(torch.tensor([[3, 4]]), max_new_tokens=1)  # leaves another initial state
        draft_options["stopping_criteria"] = [FaultyCriterion(Fault(1, RuntimeError("on purpose")))]
        with pytest.raises(RuntimeError, match="on purpose"):
            target.generate(**picture_prompts(target, 2), **draft_options, max_new_tokens=8)
        left.append(target.model.rope_deltas)
    assert torch.equal(*left)


def test_unreadable_arguments_are_refused():
    target, draft = picture_pair("llava")
    small = make_model("llama", vocab_size=64)
    small.set_input_embeddings(torch.nn.Embedding(60, 32, dtype=torch.float64))
    inputs = picture_prompts(target, 1)
    assert inputs["input_ids"].max() >= 60  # the draft reads another id in its place
    assert (
        assert_decodes_as_plain(
            target, small, inputs, max_new_tokens=4, num_assistant_tokens=2
        ).num_drafted
        > 0
    )
    foreign = {
        **inputs,
        "input_ids": inputs["input_ids"].masked_fill(inputs["input_ids"] == 60, 64),
    }
    for arguments, draft_options, message in (
        (
            inputs,
            {"assistant_model": draft, "prefill_chunk_size": 2},
            "prefill_chunk_size must be left out with ",
        ),
        (
            foreign,
            {"assistant_model": draft},
            "ids of the prompt must be below 64 for assistant_model",
        ),
    ):
        with pytest.raises(UnsupportedGenerationError, match=message):
            target.generate(**arguments, **draft_options, max_new_tokens=4)


GPT2_INPUTS = ragged_prompts(3, seed=3)
NUM_READ = GPT2_INPUTS["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("read", "cache_kind"),
    [
        # The last type is repeated.
        ({"token_type_ids": torch.arange(3 * NUM_READ).view(3, -1) % 64}, "auto"),
        (
            {"position_ids": 2 * torch.arange(NUM_READ)[None] + torch.tensor([[0], [5], [9]])},
            "auto",
        ),
        (
            {"position_ids": 2 * torch.arange(NUM_READ)[None] + torch.tensor([[0], [5], [9]])},
            "dynamic",
        ),
    ],
)
def test_passed_token_types_and_positions_continue(read, cache_kind):
    target, draft = pair("gpt2")
    inputs, options = GPT2_INPUTS | read, {"max_new_tokens": NUM_NEW}
    assert_decodes_as_plain(
        target, draft, inputs, **options, num_assistant_tokens=3, speculation_cache=cache_kind
    )
    assert not torch.equal(*(target.generate(**some, **options) for some in (inputs, GPT2_INPUTS)))
