"""Test draft models that read the images in the prompt themselves, in batches."""

from functools import cache

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import hf_speculate
from tests.cases import ACCEPTED_ALL, DRAFT_NOISE, assert_decodes_as_plain, assert_equal_ids
from tests.support.tiny import make_model, noisy_copy
from tests.support.tiny_encoders import (
    CLIP_AND_LLAMA,
    IMAGE_TOKEN_ID,
    TEXT,
    VISION,
    make,
    make_llava,
    make_qwen2_vl,
    make_qwen3_5_vl,
    mixed_prompts,
    noise,
    prompts_with,
    text_draft,
)
from tests.support.tiny_readers import READINGS, encoded_images

MAKERS = {"llava": make_llava, "qwen2_vl": make_qwen2_vl, "qwen3_5": make_qwen3_5_vl}
NUM_NEW = 16


@cache
def target_of(family: str) -> PreTrainedModel:
    """Return an enabled target. Tests share it: do not change it."""
    return hf_speculate.enable(MAKERS[family]())


@cache
def same_weights(family: str) -> PreTrainedModel:
    """Return a copy of the target for drafting. Tests share it: do not change it."""
    return noisy_copy(target_of(family), ACCEPTED_ALL)


def prompts(family: str) -> dict[str, Tensor]:
    """Return rows with zero, one and two images."""
    return mixed_prompts(target_of(family))


def encoder_of(model: PreTrainedModel) -> torch.nn.Module:
    return model.model.vision_tower if model.config.model_type == "llava" else model.model.visual


def eos_of_row(family: str, inputs: dict[str, Tensor], row: int, num_tokens: int) -> int:
    """Return a token that ends a row after at most `num_tokens` tokens."""
    text = target_of(family).generate(**inputs, max_new_tokens=NUM_NEW)
    return int(text[row, num_tokens - 1 - NUM_NEW])


@pytest.mark.parametrize("cache_kind", ["auto", "dynamic"])
@pytest.mark.parametrize("family", MAKERS)
def test_drafts_of_the_target_itself_are_all_accepted(family, cache_kind):
    target, draft, inputs = target_of(family), same_weights(family), prompts(family)
    read = []
    handle = encoder_of(draft).register_forward_hook(lambda *_: read.append(1))
    options = {
        "max_new_tokens": NUM_NEW,
        "num_assistant_tokens": 3,
        "speculation_cache": cache_kind,
    }
    options["eos_token_id"] = eos_of_row(family, inputs, 1, 6)  # one row leaves, the others go on
    stats = assert_decodes_as_plain(target, draft, inputs, **options)
    handle.remove()
    assert len(read) == 1
    assert "draft reads: text and pixel_values" in stats.plan
    assert stats.num_accepted == stats.num_verified > 0
    assert len(set(stats.rounds_per_row)) > 1
    blind = assert_decodes_as_plain(target, text_draft(target, ACCEPTED_ALL), inputs, **options)
    assert "draft reads: text alone, because" in blind.plan
    assert blind.num_accepted < blind.num_verified


@pytest.mark.parametrize("family", MAKERS)
def test_drafts_of_repeated_sampled_rows_are_all_accepted(family):
    target, draft = target_of(family), same_weights(family)
    options = {"do_sample": True, "verifier": "coupled", "seed": 5, "num_return_sequences": 2}
    stats = assert_decodes_as_plain(
        target, draft, prompts(family), **options, max_new_tokens=NUM_NEW, num_assistant_tokens=3
    )
    assert stats.num_accepted == stats.num_verified > 0


@pytest.mark.parametrize("family", MAKERS)
def test_drafts_change_with_the_picture(family):
    target, draft, inputs = (
        target_of(family),
        noisy_copy(target_of(family), ACCEPTED_ALL),
        prompts(family),
    )

    def see_another(module, args, kwargs):
        args = tuple(noise(*arg.shape, seed=9) if arg.is_floating_point() else arg for arg in args)
        kwargs = {
            name: noise(*value.shape, seed=9)
            if torch.is_tensor(value) and value.is_floating_point()
            else value
            for name, value in kwargs.items()
        }
        return args, kwargs

    encoder_of(draft).register_forward_pre_hook(see_another, with_kwargs=True)
    stats = assert_decodes_as_plain(
        target, draft, inputs, max_new_tokens=NUM_NEW, num_assistant_tokens=3
    )
    assert stats.num_accepted < stats.num_verified


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5"])
def test_positions_come_from_the_call_and_draft_is_unchanged(family):
    target, draft = target_of(family), noisy_copy(target_of(family), ACCEPTED_ALL)
    draft.model.rope_deltas = poison = torch.full((3, 1), 1000)
    stats = assert_decodes_as_plain(target, draft, prompts(family), max_new_tokens=NUM_NEW)
    assert stats.num_accepted == stats.num_verified > 0
    assert draft.model.rope_deltas is poison


@pytest.mark.parametrize(
    "own",
    [
        {"num_assistant_tokens_schedule": "heuristic"},
        {"prompt_lookup_num_tokens": 3},
        {"draft_state": hf_speculate.DraftState()},
    ],
)
def test_picture_draft_works_with_other_sources_and_schedules(own):
    target, inputs = target_of("qwen2_vl"), prompts("qwen2_vl")
    draft = noisy_copy(target, DRAFT_NOISE)
    # With a draft state, the prompt of the first call would contain other images.
    for _ in range(2):
        stats = assert_decodes_as_plain(target, draft, inputs, max_new_tokens=NUM_NEW, **own)
        assert "text and pixel_values" in stats.plan
        assert stats.num_accepted > 0
        inputs = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}


@pytest.mark.fallback("plain decoding")
@pytest.mark.parametrize(
    "own", [{}, {"max_new_tokens": 1}], ids=["as large as its target", "one token"]
)
def test_idle_draft_encodes_no_pictures(own):
    target, inputs = target_of("qwen2_vl"), prompts("qwen2_vl")
    draft, calls = noisy_copy(target, DRAFT_NOISE), []
    for module in (draft, draft.model.visual):
        module.register_forward_hook(lambda *_: calls.append(1))
    if own:
        own = {**own, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    target.generate(**inputs, assistant_model=draft, **{"max_new_tokens": NUM_NEW, **own})
    assert not calls


@pytest.mark.usefixtures("scripted")
def test_rows_leaving_before_the_first_draft_take_their_images():
    target, draft, inputs = target_of("qwen2_vl"), same_weights("qwen2_vl"), prompts("qwen2_vl")
    eos = eos_of_row("qwen2_vl", inputs, 0, 1)  # the token after the prompt
    stats = assert_decodes_as_plain(target, draft, inputs, max_new_tokens=NUM_NEW, eos_token_id=eos)
    assert stats.num_accepted == stats.num_verified > 0


def test_videos_reach_the_draft():
    target, inputs, _ = READINGS["second_per_grid_ts"]()
    draft = noisy_copy(hf_speculate.enable(target), ACCEPTED_ALL)
    stats = assert_decodes_as_plain(
        target, draft, inputs, max_new_tokens=NUM_NEW, num_assistant_tokens=3
    )
    assert "text and pixel_values_videos" in stats.plan
    assert stats.num_accepted == stats.num_verified > 0


def test_padded_vocabulary_keeps_the_picture_ids():
    target = hf_speculate.enable(make_llava())
    draft = noisy_copy(target, ACCEPTED_ALL)
    draft.resize_token_embeddings(72)
    inputs = prompts("llava")
    with pytest.warns(UserWarning, match="ids are taken to be the same"):
        stats = assert_decodes_as_plain(
            target, draft, inputs, max_new_tokens=NUM_NEW, num_assistant_tokens=3
        )
    assert "text and pixel_values" in stats.plan
    assert stats.num_accepted == stats.num_verified > 0


def with_other_patches() -> PreTrainedModel:
    """Make a LLaVA with sixteen tokens per image."""
    fields = {
        **CLIP_AND_LLAMA,
        "vision_config": {**CLIP_AND_LLAMA["vision_config"], "patch_size": 2},
    }
    return make("LlavaForConditionalGeneration", **fields, image_token_id=IMAGE_TOKEN_ID)


def with_another_id() -> PreTrainedModel:
    draft = make_llava()
    draft.config.image_token_id = 59
    return draft


# Older versions encode images in the forward of the prompt.
ENCODES_FIRST = "mm_encoder_outputs" in READINGS


@pytest.mark.parametrize(
    ("make_draft", "words"),
    [
        pytest.param(
            with_other_patches,
            "its encoder gives 48 states for 12 image tokens" if ENCODES_FIRST else "",
            marks=pytest.mark.fallback(
                "reads the text alone" if ENCODES_FIRST else "raised ValueError"
            ),
        ),
        pytest.param(
            with_another_id,
            "image tokens have the id 60 in the prompt, and 59 in its config",
            marks=pytest.mark.fallback("reads the text alone"),
        ),
        (lambda: make_model("llama", vocab_size=64), "LlamaForCausalLM takes no pixel_values"),
    ],
)
def test_text_only_draft_reads_the_text_and_reports_why(make_draft, words):
    target, inputs = target_of("llava"), prompts("llava")
    stats = assert_decodes_as_plain(
        target, make_draft(), inputs, max_new_tokens=NUM_NEW, num_assistant_tokens=3
    )
    if words:
        assert f"draft reads: text alone, because {words}" in stats.plan
        assert stats.num_drafted > 0
    assert len(stats.fallbacks) == (words[:5] != "Llama")


@pytest.mark.skipif(not ENCODES_FIRST, reason="this version of transformers does not take them")
@pytest.mark.fallback("reads the text alone")
def test_draft_does_not_read_states_of_the_target_encoder():
    target, inputs, _ = encoded_images()
    hf_speculate.enable(target)
    stats = hf_speculate.SpeculationStats()
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    draft_options = {
        "assistant_model": noisy_copy(target),
        "num_assistant_tokens": 3,
        "speculation_stats": stats,
    }
    assert_equal_ids(plain, target.generate(**inputs, max_new_tokens=NUM_NEW, **draft_options))
    assert "text alone, because mm_encoder_outputs are those of the target's encoder" in stats.plan


@pytest.mark.skipif(
    not hasattr(transformers, "Granite4VisionConfig"), reason="transformers lacks Granite 4 Vision"
)
def test_encoders_with_states_by_layer_are_read():
    """Use Granite 4 Vision, which adds encoder states of two layers to two text layers.

    It pools none of the states.
    """
    vision = {
        "model_type": "siglip_vision_model",
        **VISION,
        "hidden_size": 64,
        "patch_size": 2,
        "vision_use_head": False,
    }
    projector = {"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 24}
    projector |= {
        "cross_attention_frequency": 1,
        "max_position_embeddings": 64,
        "use_qformer_text_input": False,
    }
    projector |= {"hidden_size": 64, "encoder_hidden_size": 64, "num_attention_heads": 4}
    draft_options = {
        "vision_config": vision,
        "text_config": {"model_type": "granite", **TEXT},
        "qformer_config": projector,
    }
    draft_options |= {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "spatial_target_layers": [],
        "downsample_rate": "1/2",
    }
    draft_options |= {
        "image_token_index": IMAGE_TOKEN_ID,
        "image_grid_pinpoints": [[8, 16], [16, 8]],
    }
    target = make(
        "Granite4VisionForConditionalGeneration",
        **draft_options,
        vision_feature_select_strategy="full",
    )
    sizes = torch.tensor([[8, 16], [8, 16]])  # as in LLaVA-NeXT
    pictures = {"pixel_values": noise(2, 3, 3, 8, 8), "image_sizes": sizes}
    inputs = prompts_with(2, IMAGE_TOKEN_ID, 4 + 2 * (4 + 1), **pictures)
    draft = noisy_copy(target, ACCEPTED_ALL)
    stats = assert_decodes_as_plain(
        hf_speculate.enable(target), draft, inputs, max_new_tokens=NUM_NEW
    )
    assert "draft reads: text and pixel_values" in stats.plan
    assert stats.verified_acceptance_rate == 1.0
