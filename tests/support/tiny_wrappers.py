"""Build tiny random image and audio models that wrap a text decoder from another package."""

from typing import Any, NamedTuple

import torch
import transformers

from tests.support import tiny_encoders as tiny
from tests.support.tiny import PAD_TOKEN_ID, SLIDING_WINDOW
from tests.support.tiny_encoders import (
    IMAGE_TOKEN_ID,
    TEXT,
    VIDEO_TOKEN_ID,
    VISION,
    make,
    noise,
    prompts_with,
)
from tests.support.tiny_readers import Reading

_AUDIO_TOKEN_ID = 61
_LLAMA, _QWEN2 = ({"model_type": name, **TEXT} for name in ("llama", "qwen2"))
_QWEN3, _MISTRAL = ({"model_type": name, **TEXT, "head_dim": 8} for name in ("qwen3", "mistral"))
_LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}  # masks of two kinds
_COHERE2 = {"model_type": "cohere2", **TEXT, "sliding_window": SLIDING_WINDOW, **_LAYER_TYPES}
# Positions with three axes.
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_GLM4V = {
    "model_type": "glm4v_text",
    **TEXT,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0},
}
_QWEN3_VL = {"model_type": "qwen3_vl_text", **TEXT, "head_dim": 8, "rope_parameters": _ROPE}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    **TEXT,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}
_DEEPSEEK |= {
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}

_CLIP = {"model_type": "clip_vision_model", **VISION, "patch_size": 4}
_SIGLIP = {"model_type": "siglip_vision_model", **VISION, "patch_size": 2}
_PIXTRAL = {"model_type": "pixtral", **VISION, "patch_size": 2, "head_dim": 8}
_INTERN = {**VISION, "patch_size": [2, 2], "image_size": [8, 8]}
_MERGING = {**tiny.MERGING_VISION, "image_size": 16}
_DEEPSTACK = {
    **tiny.MERGING_VISION,
    "depth": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_JANUS = {**VISION, "patch_size": 4, "projection_dim": 32, "num_image_tokens": 4, "depth": 1}
_JANUS_VQ = {
    "embed_dim": 8,
    "num_embeddings": 16,
    "latent_channels": 32,
    "base_channels": 32,
    "num_res_blocks": 1,
}
_JANUS_VQ |= {
    "channel_multiplier": [1, 1],
    "num_patches": 4,
    "projection_dim": 32,
    "image_token_embed_dim": 32,
}
_OVIS = {
    **VISION,
    "patch_size": 4,
    "vocab_size": 16,
    "num_visual_indicator_tokens": 5,
    "hidden_stride": 1,
}
_PERCEIVER = {
    "hidden_size": 32,
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
}
_PERCEIVER |= {"resampler_head_dim": 8, "num_key_value_heads": 1}
_GOT = {
    **VISION,
    "patch_size": 2,
    "image_size": 16,
    "output_channels": 8,
    "mlp_dim": 24,
    "window_size": 4,
}
_KIMI = {name: value for name, value in VISION.items() if name != "image_size"}
_KIMI |= {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2}

_AUDIO = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_AUDIO |= {"num_mel_bins": tiny.NUM_MEL_BINS, "max_source_positions": 8}
_FLAMINGO = {**_AUDIO, "model_type": "audioflamingo3_encoder"}
_GLM_ASR = {
    **_AUDIO,
    "model_type": "glmasr_encoder",
    "intermediate_size": 64,
    "max_position_embeddings": 8,
}
_GRANITE = {
    "input_dim": 8,
    "num_layers": 2,
    "hidden_dim": 16,
    "num_heads": 2,
    "dim_head": 8,
    "output_dim": 6,
}
_GRANITE |= {
    "context_size": 8,
    "max_pos_emb": 8,
    "conv_kernel_size": 3,
    "feedforward_mult": 2,
    "dropout": 0.0,
}
_QFORMER = {
    "model_type": "blip_2_qformer",
    **_AUDIO,
    "encoder_hidden_size": 16,
    "cross_attention_frequency": 1,
}
_QWEN3_ASR = {
    "model_type": "qwen3_asr_encoder",
    "num_mel_bins": tiny.NUM_MEL_BINS,
    "encoder_layers": 1,
    "d_model": 16,
}
_QWEN3_ASR |= {
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "output_dim": 32,
    "downsample_hidden_size": 8,
}
_FUN = {
    **_AUDIO,
    "model_type": "fun_asr_nano_encoder",
    "num_stacked_frames": 1,
    "fsmn_kernel_size": 3,
}
_FUN |= {"num_timestamp_prediction_layers": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0}
_FUN_ADAPTOR = {**_AUDIO, "hidden_size": 32, "intermediate_size": 8, "projector_hidden_size": 24}
_OMNI = {
    **_AUDIO,
    "model_type": "omniasr_audio",
    "conv_dim": [8, 8],
    "conv_stride": [2, 2],
    "conv_kernel": [2, 2],
}
_OMNI |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}


class Wrapper(NamedTuple):
    """Recipe for a wrapper and a prompt with two rows."""

    class_name: str
    fields: dict[str, Any]  # fields of its config
    inputs: dict[str, Any]  # inputs besides the text: tensors, or the shape of a noise tensor
    num_tokens: int = 4  # number of image or audio tokens in the text
    seed: int = 0

    @property
    def is_here(self) -> bool:
        """Return whether this version of transformers has the class."""
        return hasattr(transformers, self.class_name)

    def make(self) -> Reading:
        """Return the model and the prompt."""
        token_id = _AUDIO_TOKEN_ID
        if not self.inputs.keys().isdisjoint({"pixel_values", "image_grid_thw"}):
            token_id = IMAGE_TOKEN_ID
        values = {
            name: noise(*value) if isinstance(value, tuple) else value
            for name, value in self.inputs.items()
        }
        inputs = prompts_with(2, token_id, self.num_tokens, **values)
        if self.fields.get("text_config", {}).get("rope_parameters"):
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == token_id).int()
        return Reading(
            make(self.class_name, self.seed, tie_word_embeddings=False, **self.fields), inputs, None
        )


_IMAGE, _INDEX = {"image_token_id": IMAGE_TOKEN_ID}, {"image_token_index": IMAGE_TOKEN_ID}
_VIDEO = {**_INDEX, "video_token_index": VIDEO_TOKEN_ID}
_MERGED = {**_IMAGE, "video_token_id": VIDEO_TOKEN_ID}
_FRAMED = {**_MERGED, "vision_start_token_id": 62, "vision_end_token_id": 63}
_TILES = {"image_grid_pinpoints": [[8, 16], [16, 8]]}
_PICTURE: dict[str, Any] = {"pixel_values": (2, 3, 8, 8)}
_SIZED = {**_PICTURE, "image_sizes": torch.tensor([[8, 8]] * 2)}
_FRAMES: dict[str, Any] = {"pixel_values_videos": (2, 2, 3, 8, 8)}
_GRID: dict[str, Any] = {
    "pixel_values": (2 * 16, 3 * 2 * 4 * 4),
    "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
}
_SOUND: dict[str, Any] = {"input_features": (2, tiny.NUM_MEL_BINS, 16)}
_MASKED_SOUND = {**_SOUND, "input_features_mask": torch.ones(2, 16).long()}
_STACKED_SOUND = {"input_features": (2, 4, 8), "input_features_mask": torch.ones(2, 4).long()}
_BLOCKS = {"input_features": (2, 8, 8), "input_features_mask": torch.ones(2, 4).bool()}
_LONG_SOUND = {
    "input_features": (2, tiny.NUM_MEL_BINS, 100),
    "input_features_mask": torch.ones(2, 100).long(),
}
_WAVE = {"input_values": (2, 1, 16), "padding_mask": torch.ones(2, 16).long()}
_SPEECH = {"text_config": {"model_type": "granite", **TEXT}, "audio_token_index": _AUDIO_TOKEN_ID}
_SPEECH |= {"downsample_rate": 2, "window_size": 4, "has_lora_adapter": False}
_AUDIO_ID = {"audio_token_id": _AUDIO_TOKEN_ID}


def _of(
    class_name: str, vision: Any, text: Any, inputs: dict[str, Any], *num: int, **fields: Any
) -> Wrapper:
    return Wrapper(
        class_name, {"vision_config": vision, "text_config": text, **fields}, inputs, *num
    )


def _of_sounds(
    class_name: str, audio: Any, text: Any, inputs: dict[str, Any], *num: int, **fields: Any
) -> Wrapper:
    fields = {"audio_config": audio, "text_config": text, **_AUDIO_ID, **fields}
    return Wrapper(class_name, fields, inputs, *num)


def _generating(name: str) -> str:
    return f"{name}ForConditionalGeneration"


# Older versions use the second name.
_FEATURE_LAYERS = {"vision_feature_layer": [-2, -1], "vision_feature_layers": [-2, -1]}
_ALL = {
    "vipllava": _of(
        _generating("VipLlava"),
        _CLIP,
        _LLAMA,
        _PICTURE,
        image_seq_length=4,
        **_INDEX,
        **_FEATURE_LAYERS,
    ),
    "aya_vision": _of(_generating("AyaVision"), _SIGLIP, _COHERE2, _PICTURE, **_INDEX),
    "cohere2_vision": _of(
        _generating("Cohere2Vision"),
        _SIGLIP,
        _COHERE2,
        _PICTURE,
        alignment_intermediate_size=48,
        **_IMAGE,
    ),
    "got_ocr2": _of(
        _generating("GotOcr2"),
        {**_GOT, "global_attn_indexes": [1]},
        _QWEN2,
        {"pixel_values": (2, 3, 16, 16)},
        image_seq_length=4,
        **_INDEX,
    ),
    "internvl": _of(
        _generating("InternVL"), _INTERN, _QWEN2, _PICTURE, image_seq_length=4, **_IMAGE
    ),
    "qianfan_ocr": _of(
        _generating("QianfanOCR"), _INTERN, _QWEN3, _PICTURE, image_seq_length=4, **_IMAGE
    ),
    "deepseek_vl": _of(
        _generating("DeepseekVL"), {**_SIGLIP, "patch_size": 4}, _LLAMA, _PICTURE, **_IMAGE
    ),
    "janus": _of(_generating("Janus"), _JANUS, _LLAMA, _PICTURE, vq_config=_JANUS_VQ, **_IMAGE),
    "ovis2": _of(
        _generating("Ovis2"),
        _OVIS,
        _QWEN2,
        _PICTURE,
        visual_indicator_token_ids=[50, 51, 52, 53, 54],
        vocab_size=64,
        hidden_size=32,
        **_IMAGE,
    ),
    "video_llava": _of(
        _generating("VideoLlava"),
        _CLIP,
        _LLAMA,
        _FRAMES,
        10,
        image_seq_length=4,
        video_seq_length=40,
        **_VIDEO,
    ),
    "llava_next_video": _of(
        _generating("LlavaNextVideo"),
        _CLIP,
        _LLAMA,
        _FRAMES,
        2,
        spatial_pool_stride=2,
        **_TILES,
        **_VIDEO,
    ),
    "llava_onevision": _of(
        _generating("LlavaOnevision"),
        {**_SIGLIP, "patch_size": 4},
        _QWEN2,
        {"pixel_values": (2, 3, 3, 8, 8), "image_sizes": torch.tensor([[8, 16]] * 2)},
        14,  # 4 for the whole image; 2 tiles give 2 rows of 4, each with an end token
        **_TILES,
        **_VIDEO,
    ),
    "mistral3": _of(
        _generating("Mistral3"), _PIXTRAL, {**_MISTRAL, "sliding_window": None}, _SIZED, **_INDEX
    ),
    "lighton_ocr": _of(_generating("LightOnOcr"), _PIXTRAL, _QWEN3, _SIZED, **_IMAGE),
    "idefics2": _of(
        _generating("Idefics2"),
        {**VISION, "patch_size": 2},
        {**_MISTRAL, "sliding_window": SLIDING_WINDOW},
        {"pixel_values": (2, 1, 3, 8, 8)},
        perceiver_config=_PERCEIVER,
        **_IMAGE,
    ),
    "smolvlm": _of(
        _generating("SmolVLM"),
        {**VISION, "patch_size": 2},
        _LLAMA,
        {"pixel_values": (2, 1, 3, 8, 8)},
        scale_factor=2,
        pad_token_id=PAD_TOKEN_ID,
        **_IMAGE,
    ),
    "glm46v": _of(
        _generating("Glm46V"),
        {"model_type": "glm4v_vision", **_MERGING},
        _GLM4V,
        _GRID,
        **_MERGED,
        image_start_token_id=62,
        image_end_token_id=63,
        video_start_token_id=58,
        video_end_token_id=59,
    ),
    "cosmos3_omni": _of(
        _generating("Cosmos3Omni"),
        {"model_type": "qwen3_vl_vision", **_DEEPSTACK},
        _QWEN3_VL,
        _GRID,
        **_FRAMED,
    ),
    "kimi_k25": _of(
        _generating("Kimi_K25"),
        _KIMI,
        _DEEPSEEK,
        {**_GRID, "pixel_values": (2 * 16, 3, 4, 4)},
        projection_hidden_size=16,
        **_FRAMED,
    ),
    "voxtral": _of_sounds(
        _generating("Voxtral"),
        {**_AUDIO, "model_type": "voxtral_encoder", "intermediate_size": 64},
        _LLAMA,
        _SOUND,
        2,
    ),
    "audioflamingo3": _of_sounds(_generating("AudioFlamingo3"), _FLAMINGO, _QWEN2, _MASKED_SOUND),
    "musicflamingo": _of_sounds(
        _generating("MusicFlamingo"),
        _FLAMINGO,
        _QWEN2,
        _MASKED_SOUND,
        audio_bos_token_id=58,
        audio_eos_token_id=59,
    ),
    "glmasr": _of_sounds(_generating("GlmAsr"), _GLM_ASR, _LLAMA, _MASKED_SOUND, 2),
    "granite_speech": Wrapper(
        _generating("GraniteSpeech"),
        {"encoder_config": _GRANITE, "projector_config": _QFORMER, **_SPEECH},
        _BLOCKS,
    ),
    "granite_speech_plus": Wrapper(
        _generating("GraniteSpeechPlus"),
        {
            "encoder_config": {**_GRANITE, "cat_hidden_layers": [1]},
            "projector_config": {**_QFORMER, "encoder_hidden_size": 32},
            **_SPEECH,
        },
        _BLOCKS,
    ),
    "fun_asr_nano": _of_sounds(
        _generating("FunAsrNano"), _FUN, _QWEN3, _STACKED_SOUND, 4, 3, adaptor_config=_FUN_ADAPTOR
    ),
    "qwen3_asr": _of_sounds(
        _generating("Qwen3ASR"),
        {**_QWEN3_ASR, "n_window": 50, "n_window_infer": 100},
        _QWEN3,
        _LONG_SOUND,
        13,
        eos_token_id=[1],
        pad_token_id=PAD_TOKEN_ID,
    ),
    "moss_transcribe_diarize": _of_sounds(
        _generating("MossTranscribeDiarize"),
        _AUDIO,
        _QWEN3,
        {**_MASKED_SOUND, "padding_mask": torch.ones(2, 16).long()},
        2,
        audio_merge_size=4,
        audio_chunk_size=16,
    ),
    "omniasr": _of_sounds(
        _generating("OmniASR"), _OMNI, _LLAMA, _WAVE, eos_token_id=None, pad_token_id=PAD_TOKEN_ID
    ),
}
WRAPPERS = {name: wrapper for name, wrapper in _ALL.items() if wrapper.is_here}
