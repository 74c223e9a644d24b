"""Build tiny random models for many families, with sizes chosen by the names of config fields."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.tiny_configs import MAX_LEN, SLIDING_WINDOW, START_TOKEN_ID, fill
from tests.support.tiny_encoders import TEXT, ready

_TEXT = {**TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": SLIDING_WINDOW}
_TEXT |= {"bos_token_id": START_TOKEN_ID}
_SPARSE = {"encoder_sparse_step": 1, "decoder_sparse_step": 2}

# Fields that a family needs in addition to the common ones.
_PLAIN_DECODERS = (
    *(
        "apertus",
        "arcee",
        "biogpt",
        "codegen",
        "cohere",
        "ctrl",
        "ernie4_5",
        "gemma",
        "glm",
        "glm4",
    ),
    *(
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "granite",
        "granitemoe",
        "helium",
        "imagegpt",
        "nemotron",
        "olmo",
    ),
    *(
        "olmo2",
        "olmo3",
        "olmoe",
        "persimmon",
        "phimoe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    ),
    *("trocr", "xglm"),
)
DECODERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN_DECODERS},
    "exaone4": {"sliding_window_pattern": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "jetmoe": {"kv_channels": 8},
    "ministral": {"head_dim": 8},
}
_PLAIN_ENCODER_DECODERS = (
    *(
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "longt5",
        "m2m_100",
        "marian",
        "mbart",
        "mt5",
        "mvp",
    ),
    *("pegasus", "pegasus_x", "plbart", "umt5"),
)
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN_ENCODER_DECODERS},
    "nllb-moe": _SPARSE,
    "switch_transformers": _SPARSE,
    "led": {"max_encoder_position_embeddings": MAX_LEN, "attention_window": 8},
    "t5gemma": {"encoder": _TEXT, "decoder": _TEXT},
}
FAMILIES = DECODERS | ENCODER_DECODERS


def make_family(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Make a tiny model of a family, in float64 if possible; `overrides` are config fields."""
    config = fill(
        CONFIG_MAPPING[model_type],
        **{"bos_token_id": START_TOKEN_ID, **FAMILIES[model_type], **overrides},
    )
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if model_type == "imagegpt":
        model = transformers.ImageGPTForCausalImageModeling(config)
    else:
        model = auto.from_config(config, dtype=torch.float64, experts_implementation="eager")
    model = ready(model, seed)
    if model_type == "xglm":  # it converts the lowest float64 number to float32
        model.to(torch.float32)
        model.config.dtype = torch.float32
    return model
