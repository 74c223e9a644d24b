"""Tiny random models of many families of transformers, whose configs are filled in by the names of their fields."""

import dataclasses
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tiny import INITIALIZER_RANGE, MAX_LEN, PAD_TOKEN_ID, SLIDING_WINDOW
from tests.tiny_encoders import START_TOKEN_ID, TEXT, VOCAB_SIZE, ready

_WIDTH, _INNER, _LAYERS, _HEADS, _HEAD_WIDTH = 32, 48, 2, 4, 8
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dff"), _INNER),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), _INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "decoder_sparse_step"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim"), _HEAD_WIDTH),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), MAX_LEN),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), START_TOKEN_ID),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), None),
    "sliding_window": SLIDING_WINDOW,
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": PAD_TOKEN_ID,
    "tie_word_embeddings": False,
    "initializer_range": INITIALIZER_RANGE,
    "moe_intermediate_size": 24,
    "encoder_sparse_step": 1,
}
_TEXT = {**TEXT, "head_dim": _HEAD_WIDTH, "query_pre_attn_scalar": _HEAD_WIDTH, "sliding_window": SLIDING_WINDOW}
_TEXT |= {"bos_token_id": START_TOKEN_ID}

# What a family needs beside the fields above.
_PLAIN_DECODERS = (
    *("apertus", "arcee", "biogpt", "codegen", "cohere", "ctrl", "ernie4_5", "gemma", "glm", "glm4"),
    *("gpt_bigcode", "gpt_neox", "gptj", "granite", "granitemoe", "helium", "imagegpt", "nemotron", "olmo"),
    *("olmo2", "olmo3", "olmoe", "persimmon", "phimoe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    *("trocr", "xglm"),
)
DECODERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN_DECODERS},
    "exaone4": {"sliding_window_pattern": 2},
    "hunyuan_v1_dense": {"head_dim": _HEAD_WIDTH},
    "jetmoe": {"kv_channels": _HEAD_WIDTH},
    "ministral": {"head_dim": _HEAD_WIDTH},
}
_PLAIN_ENCODER_DECODERS = (
    *("bigbird_pegasus", "blenderbot", "blenderbot-small", "longt5", "m2m_100", "marian", "mbart", "mt5", "mvp"),
    *("nllb-moe", "pegasus", "pegasus_x", "plbart", "switch_transformers", "umt5"),
)
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN_ENCODER_DECODERS},
    "led": {"max_encoder_position_embeddings": MAX_LEN, "attention_window": 8},
    "t5gemma": {"encoder": _TEXT, "decoder": _TEXT},
}
FAMILIES = DECODERS | ENCODER_DECODERS
_NO_FLOAT64 = ("xglm",)  # it makes a float32 number of float64's lowest


def make_family(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny model of one of `FAMILIES`, in float64 if it can be; `overrides` are fields of its config."""
    config_class = CONFIG_MAPPING[model_type]
    names = {field.name for field in dataclasses.fields(config_class)}
    fields = {name: value for name, value in _FIELDS.items() if name in names}
    config = config_class(**{**fields, **FAMILIES[model_type], **overrides})
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if model_type == "imagegpt":
        model = transformers.ImageGPTForCausalImageModeling(config)
    else:
        model = auto.from_config(config, dtype=torch.float64, experts_implementation="eager")
    start = START_TOKEN_ID if config.is_encoder_decoder else None
    model = ready(model, seed, decoder_start_token_id=start)
    if model_type in _NO_FLOAT64:
        model.to(torch.float32)
        model.config.dtype = torch.float32
    return model
