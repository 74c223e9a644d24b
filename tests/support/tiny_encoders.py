"""Build tiny random encoder-decoders and vision-language models in code."""

import copy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)

from tests.support.tiny import LOGIT_SCALE, clamp_masks, make_config, make_model, noisy_copy
from tests.support.tiny_configs import (
    COMMON,
    INITIALIZER_RANGE,
    MAX_LEN,
    PAD_TOKEN_ID,
    START_TOKEN_ID,
    VOCAB_SIZE,
    fill,
)

IMAGE_TOKEN_ID, VIDEO_TOKEN_ID = 60, 61
NUM_MEL_BINS, NUM_FRAMES = 8, 20  # frames in one Whisper window
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    **{name: COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
}
_WIDTHS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24}
VISION = _WIDTHS | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8}
MERGING_VISION = _WIDTHS | {"depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
MERGING_VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 2}

IDS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN_ID,
    "video_token_id": VIDEO_TOKEN_ID,
    "tie_word_embeddings": False,
}
QWEN_IDS = IDS | {"vision_start_token_id": 62, "vision_end_token_id": 63}
CLIP_AND_LLAMA: dict[str, Any] = {
    "vision_config": {"model_type": "clip_vision_model", **VISION, "patch_size": 4},
    "text_config": {"model_type": "llama", **TEXT},
    "image_token_index": IMAGE_TOKEN_ID,
    "tie_word_embeddings": False,
}
QWEN_ROPE = {
    "rope_type": "default",
    "type": "default",
    "mrope_section": [1, 1, 2],
    "rope_theta": 10000.0,
}
QWEN_TEXT = {**TEXT, "rope_parameters": QWEN_ROPE, "rope_scaling": QWEN_ROPE}
_START = {"decoder_start_token_id": START_TOKEN_ID}
# If the config has more layers than the decoder, some layers of its cache stay empty.
_LONGER = {"encoder_layers": 3}
# The encoder output is nearly the same in every column. Weaker output lets the prefix decide the
# text.
_T5_GAINS = {
    "EncDecAttention.o.": 0.5,
    "SelfAttention.o.": 6.0,
    "relative_attention_bias": 8.0,
    ".wo.": 3.0,
}
_BART_GAINS = {"encoder_attn.out_proj": 0.1}


def ready(
    model: PreTrainedModel, seed: int = 0, gains: dict[str, float] | None = None, **settings: Any
) -> PreTrainedModel:
    """Return the model in float64 and eval mode, with new random matrices, for greedy decoding.

    `gains` multiply the decoder weights whose names contain the keys; `settings` go into the
    generation config.
    """
    generator = torch.Generator().manual_seed(seed)
    model.to(torch.float64).eval().requires_grad_(False)
    seen: set[int] = set()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and weight.data_ptr() not in seen:
            seen.add(weight.data_ptr())
            weight.normal_(0, INITIALIZER_RANGE, generator=generator)
        for words, gain in (gains or {}).items():
            if "decoder." in name and words in name:
                weight.mul_(gain)
    model.get_output_embeddings().weight.mul_(LOGIT_SCALE)
    model.config.dtype = torch.float64
    clamp_masks(model)
    if model.config.is_encoder_decoder:
        settings["decoder_start_token_id"] = START_TOKEN_ID
    model.generation_config = GenerationConfig(
        pad_token_id=PAD_TOKEN_ID, do_sample=False, **settings
    )
    return model


def make(class_name: str, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Make a model of the class; `fields` are all its non-default config fields."""
    model_class = getattr(transformers, class_name)
    return ready(model_class(model_class.config_class(**fields)), seed)


def make_t5(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Make a T5; `overrides` are config fields."""
    config = fill(transformers.T5Config, **_START | {"num_layers": 3} | overrides)
    return ready(transformers.T5ForConditionalGeneration(config), seed, _T5_GAINS)


def make_bart(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Make a BART, which uses columns as positions; `overrides` are config fields."""
    config = fill(transformers.BartConfig, **_START | _LONGER | overrides)
    return ready(transformers.BartForConditionalGeneration(config), seed, _BART_GAINS)


def make_whisper(*, seed: int = 0, **overrides: Any) -> WhisperForConditionalGeneration:
    """Make a Whisper with windows of `NUM_FRAMES` frames; `overrides` are config fields.

    Ids from 50 on are timestamps. The generation settings match English-only checkpoints; the id
    suppressed at the beginning is not the one suppressed later.
    """
    sizes = {
        "num_mel_bins": NUM_MEL_BINS,
        "max_source_positions": NUM_FRAMES // 2,
        "max_target_positions": 96,
    }
    config = fill(transformers.WhisperConfig, **_START | _LONGER | sizes | overrides)
    settings = {
        "eos_token_id": 2,
        "suppress_tokens": [5, 9],
        "begin_suppress_tokens": [7, 2],
        "is_multilingual": False,
    }
    times = {
        "return_timestamps": False,
        "no_timestamps_token_id": 49,
        "max_initial_timestamp_index": 5,
    }
    return ready(WhisperForConditionalGeneration(config), seed, **settings, **times)


def decoder_of(model: WhisperForConditionalGeneration) -> WhisperForCausalLM:
    """Make a decoder-only draft with the weights of `model`.

    The draft attends to the encoder output of another model.
    """
    config = copy.deepcopy(model.config)  # the class changes the config in place
    decoder = WhisperForCausalLM(config).to(torch.float64).eval().requires_grad_(False)
    decoder.model.decoder.load_state_dict(model.model.decoder.state_dict())
    decoder.proj_out.load_state_dict(model.proj_out.state_dict())
    decoder.generation_config = GenerationConfig(pad_token_id=PAD_TOKEN_ID)
    return decoder


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return random float64 numbers, the same ones for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def speech(batch_size: int, *, num_frames: int = NUM_FRAMES, seed: int = 0) -> Tensor:
    """Return random features [B, mel bins, frames] float64."""
    return noise(batch_size, NUM_MEL_BINS, num_frames, seed=seed)


def make_llava(*, seed: int = 0) -> PreTrainedModel:
    """Make a LLaVA based on a Llama, with four tokens per image."""
    return make(
        "LlavaForConditionalGeneration", seed, **CLIP_AND_LLAMA, image_token_id=IMAGE_TOKEN_ID
    )


def make_qwen2_vl(*, seed: int = 0) -> PreTrainedModel:
    """Make a Qwen2-VL, whose positions have three axes and lag behind the tokens at every image."""
    vision = {**MERGING_VISION, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    return make(
        "Qwen2VLForConditionalGeneration",
        seed,
        vision_config=vision,
        text_config=QWEN_TEXT,
        **QWEN_IDS,
    )


def make_qwen3_5_vl(*, seed: int = 0) -> PreTrainedModel:
    """Make a Qwen3.5 as in its checkpoints: recurrent layers, and positions as in Qwen2-VL."""
    text = make_config("qwen3_5").to_dict()
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 1.0,
    }
    fields = {"vision_config": {**MERGING_VISION, "num_position_embeddings": 16}, **QWEN_IDS}
    return make(
        "Qwen3_5ForConditionalGeneration",
        seed,
        text_config={**text, "rope_parameters": rope},
        **fields,
    )


def text_draft(target: PreTrainedModel, noise: float = 0.01) -> PreTrainedModel:
    """Make a text-only model with noisy copies of the text weights of a vision-language model."""
    name = target.config.model_type
    family = "qwen3_5" if name == "qwen3_5" else "qwen2" if name.startswith("qwen2") else "llama"
    draft = make_model(family, vocab_size=VOCAB_SIZE)
    draft.model.load_state_dict(target.get_decoder().state_dict())
    draft.lm_head.load_state_dict(target.lm_head.state_dict())
    return noisy_copy(draft, noise)


def picture_prompts(
    target: PreTrainedModel, batch_size: int = 1, *, seed: int = 0
) -> dict[str, Tensor]:
    """Return left-padded prompts with one four-token image each, as keyword arguments."""
    inputs = prompts_with(batch_size, IMAGE_TOKEN_ID, 4)
    if target.config.model_type == "llava":
        return {**inputs, "pixel_values": noise(batch_size, 3, 8, 8, seed=seed)}
    patches = noise(batch_size * 16, 3 * 2 * 4 * 4, seed=seed)
    grid = torch.tensor([[1, 4, 4]] * batch_size)
    types = (inputs["input_ids"] == IMAGE_TOKEN_ID).int()
    return {**inputs, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": types}


def mixed_prompts(
    target: PreTrainedModel, pictures_of_rows: tuple[int, ...] = (0, 1, 2), *, seed: int = 0
) -> dict[str, Tensor]:
    """Return left-padded prompts with the given number of images per row, and different padding."""
    picture = [62, *[IMAGE_TOKEN_ID] * 4, 63]
    rows = [
        [3 + row, 4, *(picture * num), 8, *range(9, 12 + 2 * row)]
        for row, num in enumerate(pictures_of_rows)
    ]
    rows[0] += [20, 21, 22, 23]
    width, num_pictures = max(map(len, rows)), sum(pictures_of_rows)
    input_ids = torch.tensor([[PAD_TOKEN_ID] * (width - len(row)) + row for row in rows])
    inputs = {"input_ids": input_ids, "attention_mask": (input_ids != PAD_TOKEN_ID).long()}
    if target.config.model_type == "llava":
        return {**inputs, "pixel_values": noise(num_pictures, 3, 8, 8, seed=seed)}
    patches = noise(num_pictures * 16, 3 * 2 * 4 * 4, seed=seed)
    grid, types = torch.tensor([[1, 4, 4]] * num_pictures), (input_ids == IMAGE_TOKEN_ID).int()
    return {**inputs, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": types}


def prompts_with(
    batch_size: int, token_id: int, num_tokens: int, **inputs: Tensor
) -> dict[str, Tensor]:
    """Return left-padded prompts with one image of `num_tokens` tokens each, plus `inputs`."""
    rows = [
        [3 + row, 4, 62, *[token_id] * num_tokens, 63, *range(8, 8 + 3 * row)]
        for row in range(batch_size)
    ]
    width = max(map(len, rows))
    input_ids = torch.tensor([[PAD_TOKEN_ID] * (width - len(row)) + row for row in rows])
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD_TOKEN_ID).long(), **inputs}
