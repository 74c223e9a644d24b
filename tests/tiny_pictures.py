"""Tiny random readers of images whose calls take more than pixels, built in code, and prompts for them."""

import inspect
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from tests.tiny import PAD_TOKEN_ID
from tests.tiny_encoders import (
    IMAGE_TOKEN_ID,
    QWEN_IDS,
    QWEN_ROPE,
    TEXT,
    VIDEO_TOKEN_ID,
    VISION,
    make_llava,
    picture_prompts,
    prompts_with,
    ready,
)


class Reading(NamedTuple):
    """A model, a prompt with pictures, and another value of the argument in question, which gives another text."""

    target: PreTrainedModel
    inputs: dict[str, Tensor]
    other: object


def sizes_of_images() -> Reading:
    """LLaVA-NeXT, which lays the features of its tiles out by the image's size and cannot read a prompt without."""
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**VISION, patch_size=4),
        text_config=LlamaConfig(**TEXT),
        image_token_index=IMAGE_TOKEN_ID,
        image_grid_pinpoints=[[8, 16], [16, 8]],
        tie_word_embeddings=False,
    )
    target = ready(LlavaNextForConditionalGeneration(config))
    # 4 tokens of the whole image; of two tiles side by side 2 rows of 4, each with its end.
    inputs = prompts_with(2, IMAGE_TOKEN_ID, 4 + 2 * (4 + 1))
    inputs["pixel_values"] = noise(2, 3, 3, 8, 8)  # each image whole, and its two tiles
    inputs["image_sizes"] = torch.tensor([[8, 16], [8, 16]])
    return Reading(target, inputs, None)


def masks_of_pixels() -> Reading:
    """Idefics3, which does not look at the right half of the picture."""
    config = Idefics3Config(
        vision_config={**VISION, "patch_size": 2},
        text_config={"model_type": "llama", **TEXT},
        image_token_id=IMAGE_TOKEN_ID,
        scale_factor=2,
        pad_token_id=PAD_TOKEN_ID,
    )
    target = ready(Idefics3ForConditionalGeneration(config))
    inputs = prompts_with(2, IMAGE_TOKEN_ID, 4)
    inputs["pixel_values"] = noise(2, 1, 3, 8, 8)
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    mask[..., 4:] = False
    inputs["pixel_attention_mask"] = mask
    return Reading(target, inputs, torch.ones_like(mask))


def seconds_of_videos() -> Reading:
    """Qwen2.5-VL, whose positions in time go by the seconds between frames."""
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 16,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        vision_config=vision,
        text_config={**TEXT, "rope_parameters": QWEN_ROPE, "rope_scaling": QWEN_ROPE},
        **QWEN_IDS,
    )
    target = ready(Qwen2_5_VLForConditionalGeneration(config))
    inputs = prompts_with(2, VIDEO_TOKEN_ID, 8)  # 2 times 4 x 4 patches, merged by four
    inputs["pixel_values_videos"] = noise(2 * 32, 3 * 2 * 4 * 4)
    inputs["video_grid_thw"] = torch.tensor([[2, 4, 4]] * 2)
    inputs["mm_token_type_ids"] = 2 * (inputs["input_ids"] == VIDEO_TOKEN_ID).int()
    inputs["second_per_grid_ts"] = torch.tensor([1.0, 3.0])
    return Reading(target, inputs, torch.tensor([8.0, 20.0]))


def encoded_images() -> Reading:
    """LLaVA, given what its encoder made of the images."""
    target = make_llava()
    inputs = picture_prompts(target, 2)
    others = picture_prompts(target, 2, seed=1)
    encoded, other = (
        {"image": target.model.get_image_features(each.pop("pixel_values"), return_dict=True)}
        for each in (inputs, others)
    )
    return Reading(target, {**inputs, "mm_encoder_outputs": encoded}, other)


READINGS = {
    "image_sizes": sizes_of_images,
    "pixel_attention_mask": masks_of_pixels,
    "second_per_grid_ts": seconds_of_videos,
}
if "mm_encoder_outputs" in inspect.signature(type(make_llava()).forward).parameters:  # not in older versions
    READINGS["mm_encoder_outputs"] = encoded_images


def noise(*shape: int) -> Tensor:
    """The same random numbers for the same shape, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
