"""Build tiny random models that read images, patches and audio, and their prompts."""

import inspect
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.support import tiny_encoders as tiny
from tests.support.tiny import PAD_TOKEN_ID, SLIDING_WINDOW, ragged_prompts
from tests.support.tiny_encoders import IMAGE_TOKEN_ID, TEXT, VISION, make, noise, prompts_with
from tests.support.tiny_families import make_family

_AUDIO_TOKEN_ID = 61
_AUDIO_IDS = {"audio_token_id": _AUDIO_TOKEN_ID, "audio_token_index": _AUDIO_TOKEN_ID}
_QWEN2 = {"model_type": "qwen2", **TEXT}
_MERGING_ALL = {**tiny.MERGING_VISION, "fullatt_block_indexes": [0]}


class Reading(NamedTuple):
    """Model, prompt with images, and another value of the tested argument.

    The other value must give another text.
    """

    target: PreTrainedModel
    inputs: dict[str, Tensor]
    other: object


def sizes_of_images() -> Reading:
    """Make a LLaVA-NeXT, which arranges tile features by image size and so needs the size."""
    target = make(
        "LlavaNextForConditionalGeneration",
        **tiny.CLIP_AND_LLAMA,
        image_grid_pinpoints=[[8, 16], [16, 8]],
    )
    # The whole image has 4 tokens. Two tiles side by side have 2 rows of 4 tokens, each with an end
    # token. Each image comes as a whole and as two tiles.
    pixels, sizes = noise(2, 3, 3, 8, 8), torch.tensor([[8, 16], [8, 16]])
    inputs = prompts_with(
        2, IMAGE_TOKEN_ID, 4 + 2 * (4 + 1), pixel_values=pixels, image_sizes=sizes
    )
    return Reading(target, inputs, None)


def masks_of_pixels() -> Reading:
    """Make an Idefics3 that ignores the right half of the image."""
    fields = {
        "text_config": {"model_type": "llama", **TEXT},
        "scale_factor": 2,
        "pad_token_id": PAD_TOKEN_ID,
    }
    fields |= {"vision_config": {**VISION, "patch_size": 2}, "image_token_id": IMAGE_TOKEN_ID}
    target = make("Idefics3ForConditionalGeneration", **fields)
    mask = (torch.arange(8) < 4).expand(2, 1, 8, 8)
    inputs = prompts_with(
        2, IMAGE_TOKEN_ID, 4, pixel_values=noise(2, 1, 3, 8, 8), pixel_attention_mask=mask
    )
    return Reading(target, inputs, torch.ones(2, 1, 8, 8).bool())


def seconds_of_videos() -> Reading:
    """Make a Qwen2.5-VL, whose temporal positions depend on the time between frames."""
    vision = {"depth": 2, "tokens_per_second": 2, "window_size": 16, "fullatt_block_indexes": [1]}
    fields = {
        "vision_config": {**tiny.MERGING_VISION, **vision},
        "text_config": tiny.QWEN_TEXT,
        **tiny.QWEN_IDS,
    }
    target = make("Qwen2_5_VLForConditionalGeneration", **fields)
    # 2 times 4 x 4 patches, merged by four.
    patches, grid = noise(2 * 32, 3 * 2 * 4 * 4), torch.tensor([[2, 4, 4]] * 2)
    inputs = prompts_with(
        2, tiny.VIDEO_TOKEN_ID, 8, pixel_values_videos=patches, video_grid_thw=grid
    )
    inputs["mm_token_type_ids"] = 2 * (inputs["input_ids"] == tiny.VIDEO_TOKEN_ID).int()
    inputs["second_per_grid_ts"] = torch.tensor([1.0, 3.0])
    return Reading(target, inputs, torch.tensor([8.0, 20.0]))


def encoded_images() -> Reading:
    """Make a LLaVA that gets the encoder output for the images."""
    target = tiny.make_llava()
    inputs, others = tiny.picture_prompts(target, 2), tiny.picture_prompts(target, 2, seed=1)
    images = [each.pop("pixel_values") for each in (inputs, others)]
    encoded, second = (
        {"image": target.model.get_image_features(image, return_dict=True)} for image in images
    )
    return Reading(target, {**inputs, "mm_encoder_outputs": encoded}, second)


READINGS = {
    "image_sizes": sizes_of_images,
    "pixel_attention_mask": masks_of_pixels,
    "second_per_grid_ts": seconds_of_videos,
}
# Missing in older versions.
if "mm_encoder_outputs" in inspect.signature(type(tiny.make_llava()).forward).parameters:
    READINGS["mm_encoder_outputs"] = encoded_images


def patches() -> Reading:
    """Make a Fuyu, which reads image patches like embeddings."""
    text = {"model_type": "persimmon", **TEXT}
    target = make(
        "FuyuForCausalLM",
        text_config=text,
        hidden_size=32,
        patch_size=2,
        image_token_id=IMAGE_TOKEN_ID,
    )
    inputs = prompts_with(2, IMAGE_TOKEN_ID, 4, image_patches=noise(2, 4, 2 * 2 * 3))
    return Reading(target, inputs, inputs["image_patches"].flip(0))


def sounds() -> Reading:
    """Make a Qwen2-Audio: ten frames are five tokens; the first row hears all, the second fewer."""
    audio = {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": tiny.NUM_MEL_BINS,
        "max_source_positions": 10,
    }
    audio |= {
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "d_model": 16,
    }
    target = make(
        "Qwen2AudioForConditionalGeneration", audio_config=audio, text_config=_QWEN2, **_AUDIO_IDS
    )
    inputs = prompts_with(2, _AUDIO_TOKEN_ID, 5, input_features=noise(2, tiny.NUM_MEL_BINS, 20))
    inputs["feature_attention_mask"] = torch.ones(2, 20, dtype=torch.int64)
    return Reading(target, inputs, inputs["input_features"].flip(0))


def waves() -> Reading:
    """Make a VibeVoice-ASR, which draws noise when it reads a waveform."""
    encoder = {
        "model_type": "vibevoice_acoustic_tokenizer_encoder",
        "kernel_size": 3,
        "num_filters": 4,
    }
    encoder |= {"downsampling_ratios": [2], "depths": [1, 1]}
    parts = zip(("acoustic", "semantic"), (16, 32), strict=True)
    fields = {
        f"{name}_tokenizer_encoder_config": {**encoder, "hidden_size": width}
        for name, width in parts
    }
    fields |= {"text_config": _QWEN2, "audio_token_id": _AUDIO_TOKEN_ID}
    inputs = prompts_with(
        2, _AUDIO_TOKEN_ID, 4, input_values=noise(2, 1, 8), padding_mask=torch.ones(2, 8).bool()
    )
    return Reading(
        make("VibeVoiceAsrForConditionalGeneration", **fields),
        inputs,
        inputs["input_values"].flip(0),
    )


def crops() -> Reading:
    """Make a Phi-4 multimodal: a crop and the whole image, one patch each, take five tokens."""
    vision = {**VISION, "num_hidden_layers": 2, "hidden_size": 32, "patch_size": 4, "crop_size": 8}
    audio = {"num_blocks": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 24}
    audio |= {
        "depthwise_separable_out_channel": 8,
        "nemo_conv_channels": 8,
        "audio_token_id": _AUDIO_TOKEN_ID,
    }
    fields = {
        **TEXT,
        "vision_config": {**vision, "image_token_id": IMAGE_TOKEN_ID},
        "audio_config": audio,
    }
    inputs = prompts_with(2, IMAGE_TOKEN_ID, 5, image_pixel_values=noise(2, 2, 3, 8, 8))
    inputs["image_sizes"] = torch.tensor([[8, 8]] * 2)
    inputs["image_attention_mask"] = mask = torch.ones(2, 2, 2, 2)
    mask[:, 0, :, 1] = 0  # for the whole image
    return Reading(make("Phi4MultimodalForCausalLM", **fields), inputs, torch.ones(2, 2, 2, 2))


def beside_the_text() -> Reading:
    """Make an Mllama, in which one layer attends to image tiles and caches their states."""
    vision = {
        **VISION,
        "patch_size": 4,
        "num_global_layers": 1,
        "attention_heads": 2,
        "vision_output_dim": 32,
    }
    vision |= {"max_num_tiles": 2, "intermediate_layers_indices": [0]}
    vision["supported_aspect_ratios"] = [[1, 1], [1, 2], [2, 1]]
    text = {**TEXT, "bos_token_id": 1, "num_hidden_layers": 3, "cross_attention_layers": [1]}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    fields = {"vision_config": vision, "text_config": text, "image_token_index": IMAGE_TOKEN_ID}
    target = make("MllamaForConditionalGeneration", **fields)
    for name, weight in target.named_parameters():
        if "gate" in name.rsplit(".", 1)[-1]:  # gates of the image layers, closed at first
            weight.fill_(1.0)
    inputs = prompts_with(2, IMAGE_TOKEN_ID, 1, pixel_values=noise(2, 1, 2, 3, 8, 8))
    inputs["aspect_ratio_ids"] = torch.tensor([[2], [1]])
    inputs["aspect_ratio_mask"] = torch.tensor([[[1, 1]], [[1, 0]]])
    has_seen = (inputs["input_ids"] == IMAGE_TOKEN_ID).cumsum(1)[..., None, None]  # [B, T, 1, 1]
    inputs["cross_attention_mask"] = has_seen * inputs["aspect_ratio_mask"][:, None]  # [B, T, 1, 2]
    return Reading(target, inputs, torch.tensor([[3], [1]]))


READERS = {
    "image_patches": patches,
    "input_features": sounds,
    "input_values": waves,
    "image_attention_mask": crops,
    "aspect_ratio_ids": beside_the_text,
}


def make_exaone4_5() -> PreTrainedModel:
    """Make an EXAONE 4.5, whose `prepare_inputs_for_generation` does not return positions."""
    vision = {**_MERGING_ALL, "num_key_value_heads": 1}
    text = {
        "model_type": "exaone4",
        **TEXT,
        "sliding_window": SLIDING_WINDOW,
        "sliding_window_pattern": 2,
    }
    ids = {"image_token_id": IMAGE_TOKEN_ID, "video_token_id": tiny.VIDEO_TOKEN_ID}
    return make("Exaone4_5_ForConditionalGeneration", vision_config=vision, text_config=text, **ids)


def make_hyperclovax() -> PreTrainedModel:
    """Make a HyperCLOVA X Vision v2, which does not return positions either."""
    vision = {"model_type": "qwen2_5_vl_vision", **_MERGING_ALL}
    text = {"model_type": "hyperclovax", **TEXT}
    return make(
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        vision_config=vision,
        text_config=text,
        **tiny.IDS,
    )


COLUMN_COUNTERS = {"exaone4_5": make_exaone4_5}
if hasattr(transformers, "HyperCLOVAXVisionV2Config"):  # missing in older versions
    COLUMN_COUNTERS["hyperclovax"] = make_hyperclovax


def attention_to_all() -> Reading:
    """Make an LED, whose encoder attends in windows except at the tokens that a mask selects."""
    inputs = ragged_prompts(2, seed=1)
    inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    mask = torch.zeros_like(inputs["input_ids"])
    inputs["global_attention_mask"] = mask.index_fill(1, torch.tensor([0, 2]), 1)
    return Reading(make_family("led", attention_window=4), inputs, mask)


def pictures_of_an_encoder() -> Reading:
    """Make a T5Gemma 2, whose encoder reads one four-token image in each text."""
    sizes = {
        **TEXT,
        "bos_token_id": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": SLIDING_WINDOW,
    }
    vision = {"model_type": "siglip_vision_model", **VISION, "patch_size": 2}
    encoder = {"text_config": sizes, "vision_config": vision, "mm_tokens_per_image": 4}
    encoder |= {"image_token_index": IMAGE_TOKEN_ID, "boi_token_index": 62, "eoi_token_index": 63}
    fields = {
        "encoder": encoder,
        "decoder": sizes,
        "image_token_index": IMAGE_TOKEN_ID,
        "tie_word_embeddings": False,
    }
    target = make("T5Gemma2ForConditionalGeneration", **fields)
    inputs = prompts_with(2, IMAGE_TOKEN_ID, 4, pixel_values=noise(2, 3, 8, 8))
    return Reading(target, inputs, inputs["pixel_values"].flip(0))


ENCODERS = {"global_attention_mask": attention_to_all, "pixel_values": pictures_of_an_encoder}
