"""Configurations of tiny hybrid and recurrent models, for `tests.tiny.make_model`."""

from typing import Any

import transformers
from transformers import MiniMaxConfig, PreTrainedConfig, RecurrentGemmaConfig, RwkvConfig, xLSTMConfig

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GATED_DELTA: dict[str, Any] = {
    **_SIZES,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
# Prompts are padded to chunks of 128 or 256 tokens by default, which takes most of a small model's time.
_CHUNK_SIZE = 8
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": _CHUNK_SIZE,
}
_DELTA_AND_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
_SHORT_CONV: dict[str, Any] = {**_SIZES, "layer_types": ["conv", "full_attention", "conv"]}

# Kind -> name of the config class, fields. Old versions of transformers lack some of the classes.
_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", _GATED_DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_GATED_DELTA, **_EXPERTS}),
    "qwen3_next": ("Qwen3NextConfig", {**_GATED_DELTA, **_EXPERTS}),
    "lfm2": ("Lfm2Config", _SHORT_CONV),
    "lfm2_moe": ("Lfm2MoeConfig", {**_SHORT_CONV, **_EXPERTS, "num_dense_layers": 1}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "chunk_size": _CHUNK_SIZE,
            "n_groups": 2,
            "time_step_min": 0.1,
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_SIZES,
            **_MAMBA2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.35,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {**_SIZES, **_MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 64, "head_dim": 8, "ssm_in_multiplier": 1.5},
    ),
    "bamba": ("BambaConfig", {**_SIZES, **_MAMBA2, "attn_layer_indices": [1]}),
    "kimi_linear": ("KimiLinearConfig", {**_DELTA_AND_LATENT, "linear_head_dim": 8, "linear_num_heads": 4}),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {**{name: value for name, value in _GATED_DELTA.items() if name != "head_dim"}, "linear_num_key_heads": 4},
    ),
    "jamba": (
        "JambaConfig",
        {**_SIZES, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 2},
    ),
    "zamba": (
        "ZambaConfig",
        {
            **_SIZES,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "mamba_d_state": 8,
            "n_mamba_heads": 2,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **_SIZES,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "chunk_size": _CHUNK_SIZE,
            "n_mamba_heads": 4,
            "time_step_min": 0.1,
            "use_mem_rope": True,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": _CHUNK_SIZE,
        },
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {**_DELTA_AND_LATENT, "head_dim": 8, "first_k_dense_replace": 1, "num_mtp_layers": 0},
    ),
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "falcon_mamba": ("FalconMambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "lfm3": (
        "Lfm3Config",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "head_dim": 8,
            "sliding_window": 8,
        },
    ),
    "inkling": (
        "InklingTextConfig",
        {
            **_SIZES,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "head_dim": 8,
            "swa_head_dim": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "sliding_window_size": 8,
            "d_rel": 4,
            "rel_extent": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "zaya": ("ZayaConfig", {**_SIZES, "head_dim": 8, "num_experts": 4, "router_hidden_size": 16}),
}
# Models whose recurrent states lie in no cache layer that is handed to their modules.
UNSUPPORTED_RECURRENT: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "minimax": (MiniMaxConfig, {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]}),
    "recurrent_gemma": (RecurrentGemmaConfig, {"lru_width": 32}),
    "rwkv": (RwkvConfig, {"attention_hidden_size": 32, "context_length": 32}),
    "xlstm": (xLSTMConfig, {"num_heads": 4}),
}
RECURRENT_WITH_EXPERTS = (
    "qwen3_5_moe",
    "qwen3_next",
    "lfm2_moe",
    "granite_hybrid",
    "kimi_linear",
    "jamba",
    "bailing_hybrid",
    "inkling",
    "zaya",
)
RECURRENT_KINDS: tuple[str, ...] = tuple(kind for kind, (name, _) in _FIELDS.items() if hasattr(transformers, name))


def recurrent_configs() -> dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]]:
    """Kind -> config class, fields; those that this version of transformers has."""
    return {kind: (getattr(transformers, _FIELDS[kind][0]), _FIELDS[kind][1]) for kind in RECURRENT_KINDS}


def unsupported_config(kind: str) -> PreTrainedConfig:
    """The config of a tiny model of `UNSUPPORTED_RECURRENT`."""
    config_class, fields = UNSUPPORTED_RECURRENT[kind]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return config_class(vocab_size=64, num_key_value_heads=2, head_dim=8, **sizes, **fields)
