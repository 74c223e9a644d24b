"""Make tiny configs, including recurrent ones, with sizes chosen by the names of config fields."""

import dataclasses
from typing import Any

import transformers
from transformers import PreTrainedConfig

SLIDING_WINDOW = 8
MAX_LEN = 512
PAD_TOKEN_ID, START_TOKEN_ID = 0, 1
VOCAB_SIZE = 64
# A standard deviation of 0.3 at width 32 makes attention peaked, and the blocks outweigh the
# residual stream. Therefore the text depends on its prefix, and greedy text does not repeat one
# token forever.
INITIALIZER_RANGE = 0.3

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "initializer_range": INITIALIZER_RANGE,
    "tie_word_embeddings": False,  # tied heads prefer the token that was just read
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD_TOKEN_ID,
}
# A config class takes the fields that it has, some of them under another name.
_NAMES: dict[Any, str] = {
    32: "hidden_size d_model n_embd embedding_size word_embed_proj_dim",
    48: "intermediate_size ffn_dim d_ff dff encoder_ffn_dim decoder_ffn_dim",
    24: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size",
    16: "kv_lora_rank mamba_d_head mamba_head_dim router_hidden_size",
    8: "head_dim d_kv rotary_dim query_pre_attn_scalar sliding_window qk_rope_head_dim "
    "qk_nope_head_dim v_head_dim swa_head_dim linear_head_dim linear_key_head_dim "
    "linear_value_head_dim sliding_window_size mamba_d_state "
    # Chunks of 128 tokens would take most of the time of a small model.
    "ssm_state_size state_size chunk_size mamba_chunk_size",
    4: "num_attention_heads n_head num_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads swa_num_attention_heads linear_num_value_heads linear_num_heads "
    "mamba_n_heads mamba_num_heads n_mamba_heads num_experts num_local_experts n_routed_experts",
    2: "num_hidden_layers n_layer num_layers encoder_layers decoder_layers "
    "num_decoder_layers num_key_value_heads swa_num_key_value_heads linear_num_key_heads "
    "mamba_n_groups mamba_ngroups n_groups num_experts_per_tok",
    1: "n_group topk_group n_shared_experts",
    INITIALIZER_RANGE: "init_std",
    MAX_LEN: "max_position_embeddings n_positions max_seq_len",
    None: "forced_eos_token_id",
}
_SIZES = {name: value for value, names in _NAMES.items() for name in names.split()}


def fill(config_class: type[PreTrainedConfig], **fields: Any) -> PreTrainedConfig:
    """Make a config with tiny sizes; `fields` are specific to the config."""
    aliases, names = (
        config_class.attribute_map,
        {field.name for field in dataclasses.fields(config_class)},
    )
    own = {aliases.get(name, name) for name in fields}
    aliases = {name: size for name, size in aliases.items() if size not in _SIZES}
    known = [
        name
        for name in _SIZES
        if name in names | aliases.keys() and aliases.get(name, name) not in own
    ]
    return config_class(**{**COMMON, **{name: _SIZES[name] for name in known}, **fields})


_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA_AND_LATENT = {
    **_LINEAR,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_key_value_heads": 4,
}
_SHORT_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_MAMBA_AND_ATTENTION = {
    "layers_block_type": ["mamba", "hybrid", "mamba"],
    "num_key_value_heads": 4,
    "head_dim": 16,
}
_LFM3 = ["conv", "full_attention", "conv", "sliding_attention"]
_NEMOTRON = ["mamba", "mlp", "attention", "mamba"]
_INKLING = {
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
# Kind -> name of the config class and its specific fields. Old versions of transformers lack some
# of the classes.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", _LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _LINEAR),
    "qwen3_next": ("Qwen3NextConfig", _LINEAR),
    "lfm2": ("Lfm2Config", _SHORT_CONV),
    "lfm2_moe": ("Lfm2MoeConfig", {**_SHORT_CONV, "num_dense_layers": 1}),
    "nemotron_h": (
        "NemotronHConfig",
        {"num_hidden_layers": 4, "layers_block_type": _NEMOTRON, "time_step_min": 0.1},
    ),
    "granite_hybrid": ("GraniteMoeHybridConfig", {**_LINEAR, "attention_multiplier": 0.35}),
    "falcon_h1": (
        "FalconH1Config",
        {"num_hidden_layers": 2, "mamba_d_ssm": 64, "ssm_in_multiplier": 1.5},
    ),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1]}),
    "kimi_linear": ("KimiLinearConfig", _DELTA_AND_LATENT),
    "olmo_hybrid": ("OlmoHybridConfig", {**_LINEAR, "linear_num_key_heads": 4}),
    "jamba": ("JambaConfig", {"attn_layer_period": 3, "attn_layer_offset": 1}),
    "zamba": ("ZambaConfig", {**_MAMBA_AND_ATTENTION, "n_mamba_heads": 2}),
    "zamba2": (
        "Zamba2Config",
        {**_MAMBA_AND_ATTENTION, "time_step_min": 0.1, "use_mem_rope": True},
    ),
    "mamba2": ("Mamba2Config", {"num_hidden_layers": 2, "head_dim": 16}),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {**_DELTA_AND_LATENT, "first_k_dense_replace": 1, "num_mtp_layers": 0},
    ),
    "mamba": ("MambaConfig", {"num_hidden_layers": 2}),
    "falcon_mamba": ("FalconMambaConfig", {"num_hidden_layers": 2}),
    "lfm3": ("Lfm3Config", {"num_hidden_layers": 4, "layer_types": _LFM3}),
    "inkling": ("InklingTextConfig", {**_INKLING, "d_rel": 4, "rel_extent": 32}),
    "zaya": ("ZayaConfig", {"num_experts_per_tok": 1}),
}
# Models whose recurrent states are outside the cache layers passed to their modules.
UNSUPPORTED_RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax": ("MiniMaxConfig", {"layer_types": ["linear_attention", "full_attention"]}),
    "recurrent_gemma": ("RecurrentGemmaConfig", {"lru_width": 32}),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 32}),
    "xlstm": ("xLSTMConfig", {}),
}
RECURRENT_FAMILIES: tuple[str, ...] = tuple(
    family for family, (name, _) in _KINDS.items() if hasattr(transformers, name)
)


def recurrent_configs() -> dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]]:
    """Return config class and fields by kind, for the kinds in this version of transformers."""
    known = {family: _KINDS[family] for family in RECURRENT_FAMILIES}
    return {
        family: (getattr(transformers, name), {"num_hidden_layers": 3, **fields})
        for family, (name, fields) in known.items()
    }


def unsupported_config(family: str) -> PreTrainedConfig:
    """Make a tiny config for a model in `UNSUPPORTED_RECURRENT`."""
    name, fields = UNSUPPORTED_RECURRENT[family]
    return fill(getattr(transformers, name), **fields)
