"""Fields of tiny hybrid and recurrent models, for `tests.tiny.make_model`."""

from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.tiny_configs import fill

_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA_AND_LATENT = {**_LINEAR, "mlp_layer_types": ["dense", "sparse", "sparse"], "num_key_value_heads": 4}
_SHORT_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_MAMBA_AND_ATTENTION = {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_key_value_heads": 4, "head_dim": 16}
_LFM3 = ["conv", "full_attention", "conv", "sliding_attention"]
_NEMOTRON = ["mamba", "mlp", "attention", "mamba"]
_INKLING = {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse", "sparse"]}
# Kind -> name of the config class, fields of its own. Old versions of transformers lack some of the classes.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", _LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _LINEAR),
    "qwen3_next": ("Qwen3NextConfig", _LINEAR),
    "lfm2": ("Lfm2Config", _SHORT_CONV),
    "lfm2_moe": ("Lfm2MoeConfig", {**_SHORT_CONV, "num_dense_layers": 1}),
    "nemotron_h": ("NemotronHConfig", {"num_hidden_layers": 4, "layers_block_type": _NEMOTRON, "time_step_min": 0.1}),
    "granite_hybrid": ("GraniteMoeHybridConfig", {**_LINEAR, "attention_multiplier": 0.35}),
    "falcon_h1": ("FalconH1Config", {"num_hidden_layers": 2, "mamba_d_ssm": 64, "ssm_in_multiplier": 1.5}),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1]}),
    "kimi_linear": ("KimiLinearConfig", _DELTA_AND_LATENT),
    "olmo_hybrid": ("OlmoHybridConfig", {**_LINEAR, "linear_num_key_heads": 4}),
    "jamba": ("JambaConfig", {"attn_layer_period": 3, "attn_layer_offset": 1}),
    "zamba": ("ZambaConfig", {**_MAMBA_AND_ATTENTION, "n_mamba_heads": 2}),
    "zamba2": ("Zamba2Config", {**_MAMBA_AND_ATTENTION, "time_step_min": 0.1, "use_mem_rope": True}),
    "mamba2": ("Mamba2Config", {"num_hidden_layers": 2, "head_dim": 16}),
    "bailing_hybrid": ("BailingHybridConfig", {**_DELTA_AND_LATENT, "first_k_dense_replace": 1, "num_mtp_layers": 0}),
    "mamba": ("MambaConfig", {"num_hidden_layers": 2}),
    "falcon_mamba": ("FalconMambaConfig", {"num_hidden_layers": 2}),
    "lfm3": ("Lfm3Config", {"num_hidden_layers": 4, "layer_types": _LFM3}),
    "inkling": ("InklingTextConfig", {**_INKLING, "d_rel": 4, "rel_extent": 32}),
    "zaya": ("ZayaConfig", {"num_experts_per_tok": 1}),
}
# Models whose recurrent states lie in no cache layer that is handed to their modules.
UNSUPPORTED_RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax": ("MiniMaxConfig", {"layer_types": ["linear_attention", "full_attention"]}),
    "recurrent_gemma": ("RecurrentGemmaConfig", {"lru_width": 32}),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 32}),
    "xlstm": ("xLSTMConfig", {}),
}
RECURRENT_KINDS: tuple[str, ...] = tuple(kind for kind, (name, _) in _KINDS.items() if hasattr(transformers, name))


def recurrent_configs() -> dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]]:
    """Kind -> config class, fields; those that this version of transformers has."""
    known = {kind: _KINDS[kind] for kind in RECURRENT_KINDS}
    return {kind: (getattr(transformers, name), {"num_hidden_layers": 3, **own}) for kind, (name, own) in known.items()}


def unsupported_config(kind: str) -> PreTrainedConfig:
    """The config of a tiny model of `UNSUPPORTED_RECURRENT`."""
    name, fields = UNSUPPORTED_RECURRENT[kind]
    return fill(getattr(transformers, name), **fields)
