"""Readers of images, types and positions decode as plain `generate` does, with a draft of text alone."""

import threading
from functools import cache

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value, pair, plain_and_ours
from tests.tiny import make_model, ragged_prompts
from tests.tiny_encoders import make_llava, make_qwen2_vl, make_qwen3_5_vl, picture_prompts, text_draft
from tests.tiny_pictures import READINGS

NUM_NEW = 24
MAKERS = {"llava": make_llava, "qwen2_vl": make_qwen2_vl, "qwen3_5": make_qwen3_5_vl}


@cache
def picture_pair(kind):
    """An enabled target and a draft of text alone. Shared between tests: change neither."""
    target = hf_speculate.enable(MAKERS[kind]())
    return target, text_draft(target)


@each_value(cache_kind=["auto", "dynamic"], kind=[*MAKERS, *MAKERS], batch_size=[1, 3])
def test_greedy_equals_plain(kind, batch_size, cache_kind):
    target, draft = picture_pair(kind)
    inputs, options = picture_prompts(target, batch_size), {"max_new_tokens": NUM_NEW}
    stats = assert_decodes_as_plain(target, draft, inputs, **options, speculation_cache=cache_kind)
    assert 0 < stats.num_accepted < stats.num_verified
    blind = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    assert not torch.equal(*(target.generate(**some, **options) for some in (inputs, blind)))  # the picture was seen


def test_videos_are_read_as_images_are():
    target, draft = picture_pair("qwen2_vl")
    pictures, config = picture_prompts(target, 2), target.config
    ids = pictures["input_ids"]
    input_ids = ids.masked_fill(ids == config.image_token_id, config.video_token_id)
    text = {"input_ids": input_ids, "attention_mask": pictures["attention_mask"]}
    video = {
        "pixel_values_videos": pictures["pixel_values"],
        "video_grid_thw": pictures["image_grid_thw"],
        "mm_token_type_ids": 2 * pictures["mm_token_type_ids"],
    }
    assert_decodes_as_plain(target, draft, {**text, **video}, max_new_tokens=NUM_NEW)
    assert not torch.equal(*(target.generate(**text, **more, max_new_tokens=NUM_NEW) for more in (video, {})))


@pytest.mark.parametrize(
    ("options", "num_tokens"), [({"vision_feature_layer": -1}, 4), ({"vision_feature_select_strategy": "full"}, 5)]
)
def test_features_are_chosen_as_the_call_says(options, num_tokens):
    target, draft = picture_pair("llava")
    pictures = picture_prompts(target, 1)
    image = [target.config.image_token_id] * num_tokens
    inputs = {"input_ids": torch.tensor([[3, 62, *image, 63, 8]]), "pixel_values": pictures["pixel_values"]}
    plain, ours = plain_and_ours(target, draft, {**inputs, **options}, max_new_tokens=NUM_NEW)
    assert_equal_ids(plain, ours)
    if num_tokens == 4:  # else the default cannot read the prompt
        assert not torch.equal(target.generate(**inputs, max_new_tokens=NUM_NEW), ours)


@pytest.mark.parametrize("name", READINGS)
def test_arguments_beside_the_pixels_are_read_with_the_prompt(name):
    target, inputs, other = READINGS[name]()
    stats = hf_speculate.SpeculationStats()
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    hf_speculate.enable(target)
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": 3, "assistant_model": text_draft(target)}
    ours = target.generate(**inputs, **options, speculation_stats=stats)
    assert_equal_ids(plain, ours)
    assert 0 < stats.num_accepted < stats.num_verified
    if other is not None:  # else the pixels have no other reading
        assert not torch.equal(target.generate(**{**inputs, name: other}, **options), ours)


def test_positions_after_an_image_fall_behind_the_number_of_tokens():
    target, draft = picture_pair("qwen2_vl")
    inputs = picture_prompts(target, 2)
    target.generate(**inputs, assistant_model=draft, num_assistant_tokens=3, max_new_tokens=4)
    assert (target.model.rope_deltas == -2).all()
    seen = []

    def see(module, args, kwargs):
        seen.append(kwargs["position_ids"])

    handle = target.model.language_model.register_forward_pre_hook(see, with_kwargs=True)
    try:
        target.generate(**inputs, assistant_model=draft, num_assistant_tokens=3, max_new_tokens=8)
    finally:
        handle.remove()
    prompt, later = seen[0], seen[1]
    assert later.shape == (4, 2, 4)  # text, time, height, width; rows; the newest token and three drafts
    assert torch.equal(later[:, :, 0], prompt[:, :, -1] + 1)
    assert torch.equal(later[0] - later[1], torch.full((2, 4), 2))


@pytest.mark.parametrize("kind", MAKERS)
def test_coupled_sampling_of_several_sequences_is_the_same_with_and_without_a_draft(kind):
    target, draft = picture_pair(kind)
    options = {"do_sample": True, "verifier": "coupled", "seed": 7, "max_new_tokens": 16, "num_return_sequences": 2}
    assert_decodes_as_plain(target, draft, picture_prompts(target, 2), **options, num_assistant_tokens=4)


def test_rows_that_end_leave_with_their_positions():
    target, draft = picture_pair("qwen2_vl")
    inputs = picture_prompts(target, 3)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": [int(text[0, -20]), int(text[2, -12])]}
    assert_decodes_as_plain(target, draft, inputs, **options, num_assistant_tokens=3)


def test_a_second_turn_goes_on_from_the_cache():
    target, draft = picture_pair("qwen2_vl")
    inputs = picture_prompts(target, 1)
    texts = []
    for options in ({}, {"assistant_model": draft, "num_assistant_tokens": 3}):
        past = DynamicCache(config=target.config.get_text_config())
        first = target.generate(**inputs, **options, past_key_values=past, max_new_tokens=6)
        more = torch.cat([first, torch.tensor([[9, 8, 7]])], dim=1)
        mask = torch.ones_like(more)
        texts.append(
            target.generate(more, attention_mask=mask, **options, past_key_values=past, max_new_tokens=NUM_NEW)
        )
    assert_equal_ids(*texts)


def test_threads_do_not_read_each_others_positions():
    target, draft = picture_pair("qwen2_vl")
    calls = [picture_prompts(target, batch_size, seed=batch_size) for batch_size in (1, 2, 3, 2)]
    calls[3] = {name: calls[3][name] for name in ("input_ids", "attention_mask")}  # no picture, so another delta
    options = {"assistant_model": draft, "num_assistant_tokens": 3, "max_new_tokens": 12}
    wanted = [target.generate(**inputs, max_new_tokens=12) for inputs in calls]
    got: dict[int, torch.Tensor] = {}

    def run(index):
        got[index] = target.generate(**calls[index], **options)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, plain in enumerate(wanted):
        assert_equal_ids(plain, got[index])


def test_a_failed_run_leaves_the_model_as_plain_generate_would():
    target, draft = picture_pair("qwen2_vl")
    inputs = picture_prompts(target, 2)
    left = []
    for options in ({}, {"assistant_model": draft, "num_assistant_tokens": 3}):
        target.generate(torch.tensor([[3, 4]]), max_new_tokens=1)  # another state to start from

        def fail(input_ids, scores):
            raise KeyError("no more")

        with pytest.raises(KeyError, match="no more"):
            target.generate(**inputs, **options, logits_processor=[fail], max_new_tokens=8)
        left.append(target.model.rope_deltas)
    assert torch.equal(*left)
    assert_equal_ids(*plain_and_ours(target, draft, inputs, max_new_tokens=8))


def test_what_is_refused():
    target, draft = picture_pair("llava")
    inputs = picture_prompts(target, 1)
    with pytest.raises(UnsupportedGenerationError, match="prefill_chunk_size must be left out with "):
        target.generate(**inputs, assistant_model=draft, prefill_chunk_size=2, max_new_tokens=4)
    small = make_model("llama", vocab_size=64)
    small.set_input_embeddings(torch.nn.Embedding(60, 32, dtype=torch.float64))
    with pytest.raises(UnsupportedGenerationError, match="ids of the prompt must be below 60 for assistant_model"):
        target.generate(**inputs, assistant_model=small, max_new_tokens=4)


def test_token_types_repeat_the_prompts_last():
    inputs = ragged_prompts(3, seed=3)
    types = {"token_type_ids": torch.randint(0, 64, inputs["input_ids"].shape)}
    assert_read("gpt2", inputs, types)


def assert_read(kind, inputs, read, **own):
    """The text with what is read beside the prompt is plain decoding's, and another one without."""
    target, draft = pair(kind)
    assert_decodes_as_plain(target, draft, inputs | read, max_new_tokens=NUM_NEW, num_assistant_tokens=3, **own)
    assert not torch.equal(*(target.generate(**some, max_new_tokens=NUM_NEW) for some in (inputs, inputs | read)))


@pytest.mark.parametrize("cache_kind", ["auto", "dynamic"])
def test_positions_that_the_user_passes_go_on_from_the_last(cache_kind):
    inputs = ragged_prompts(3, seed=4)
    positions = 2 * torch.arange(inputs["input_ids"].shape[1])[None] + torch.tensor([[0], [5], [9]])
    assert_read("gpt2", inputs, {"position_ids": positions}, speculation_cache=cache_kind)
