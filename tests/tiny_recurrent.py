"""Configurations of tiny hybrid and recurrent models, for `tests.tiny.make_model`."""

import dataclasses
from typing import Any

import transformers
from transformers import MiniMaxConfig, PreTrainedConfig, RecurrentGemmaConfig, RwkvConfig, xLSTMConfig

# Fields of all configs that have them.
_FIELDS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    **dict.fromkeys(
        ("num_attention_heads", "swa_num_attention_heads", "linear_num_value_heads", "linear_num_heads"), 4
    ),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "kv_lora_rank", "router_hidden_size"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "sliding_window_size"), 8),
    # Prompts are padded to chunks of 128 or 256 tokens by default, which takes most of a small model's time.
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    "num_experts_per_tok": 2,
}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA_AND_LATENT = {**_LINEAR, "mlp_layer_types": ["dense", "sparse", "sparse"], "num_key_value_heads": 4}
_SHORT_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_MAMBA_AND_ATTENTION = {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_key_value_heads": 4}
# Kind -> name of the config class, fields of its own. Old versions of transformers lack some of the classes.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", _LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _LINEAR),
    "qwen3_next": ("Qwen3NextConfig", _LINEAR),
    "lfm2": ("Lfm2Config", _SHORT_CONV),
    "lfm2_moe": ("Lfm2MoeConfig", {**_SHORT_CONV, "num_dense_layers": 1}),
    "nemotron_h": (
        "NemotronHConfig",
        {"num_hidden_layers": 4, "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "time_step_min": 0.1},
    ),
    "granite_hybrid": ("GraniteMoeHybridConfig", {**_LINEAR, "attention_multiplier": 0.35}),
    "falcon_h1": ("FalconH1Config", {"num_hidden_layers": 2, "mamba_d_ssm": 64, "ssm_in_multiplier": 1.5}),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1]}),
    "kimi_linear": ("KimiLinearConfig", _DELTA_AND_LATENT),
    "olmo_hybrid": ("OlmoHybridConfig", {**_LINEAR, "linear_num_key_heads": 4}),
    "jamba": ("JambaConfig", {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2}),
    "zamba": ("ZambaConfig", {**_MAMBA_AND_ATTENTION, "n_mamba_heads": 2}),
    "zamba2": ("Zamba2Config", {**_MAMBA_AND_ATTENTION, "time_step_min": 0.1, "use_mem_rope": True}),
    "mamba2": ("Mamba2Config", {"num_hidden_layers": 2, "head_dim": 16}),
    "bailing_hybrid": ("BailingHybridConfig", {**_DELTA_AND_LATENT, "first_k_dense_replace": 1, "num_mtp_layers": 0}),
    "mamba": ("MambaConfig", {"num_hidden_layers": 2}),
    "falcon_mamba": ("FalconMambaConfig", {"num_hidden_layers": 2}),
    "lfm3": (
        "Lfm3Config",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "sliding_window": 8,
        },
    ),
    "inkling": (
        "InklingTextConfig",
        {
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "d_rel": 4,
            "rel_extent": 32,
        },
    ),
    "zaya": ("ZayaConfig", {"num_experts_per_tok": 1}),
}
# Models whose recurrent states lie in no cache layer that is handed to their modules.
UNSUPPORTED_RECURRENT: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "minimax": (MiniMaxConfig, {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]}),
    "recurrent_gemma": (RecurrentGemmaConfig, {"lru_width": 32}),
    "rwkv": (RwkvConfig, {"attention_hidden_size": 32, "context_length": 32}),
    "xlstm": (xLSTMConfig, {"num_heads": 4}),
}
RECURRENT_WITH_EXPERTS = (
    *("qwen3_5_moe", "qwen3_next", "lfm2_moe", "granite_hybrid", "kimi_linear", "jamba", "bailing_hybrid"),
    *("inkling", "zaya"),
)
RECURRENT_KINDS: tuple[str, ...] = tuple(kind for kind, (name, _) in _KINDS.items() if hasattr(transformers, name))


def recurrent_configs() -> dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]]:
    """Kind -> config class, fields; those that this version of transformers has."""
    configs = {}
    for kind in RECURRENT_KINDS:
        name, own = _KINDS[kind]
        config_class = getattr(transformers, name)
        names = {field.name for field in dataclasses.fields(config_class)}
        configs[kind] = config_class, {**{name: value for name, value in _FIELDS.items() if name in names}, **own}
    return configs


def unsupported_config(kind: str) -> PreTrainedConfig:
    """The config of a tiny model of `UNSUPPORTED_RECURRENT`."""
    config_class, fields = UNSUPPORTED_RECURRENT[kind]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return config_class(vocab_size=64, num_key_value_heads=2, head_dim=8, **sizes, **fields)
