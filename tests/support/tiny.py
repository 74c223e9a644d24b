"""Build tiny random models in code, so no test needs a download."""

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_speculate.models.foreign_code import KNOWN_PACKAGES
from tests.support.tiny_configs import INITIALIZER_RANGE as INITIALIZER_RANGE
from tests.support.tiny_configs import MAX_LEN as MAX_LEN
from tests.support.tiny_configs import (
    PAD_TOKEN_ID,
    RECURRENT_FAMILIES,
    SLIDING_WINDOW,
    fill,
    recurrent_configs,
)

# Most hooks in tests only count forwards and the like. Only `tests.generation.test_hooks` makes
# hooks that count as a user's.
KNOWN_PACKAGES.add("tests")

# With this scale, the median gap between the two largest logits is above 0.5 for every kind, 1e14
# times the resolution of float64.
LOGIT_SCALE = 2.0
_ALTERNATING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_SHARED: dict[str, Any] = {  # the last two layers share the states of the first two
    "num_hidden_layers": 4,
    "layer_types": _ALTERNATING["layer_types"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
_ALTUP = {"activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 4, "altup_num_inputs": 2}
_SOFTCAPS = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_CHUNKED = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
_CHUNKED |= {"attention_chunk_size": SLIDING_WINDOW}
_ONE_EXPERT = {"num_local_experts": 2, "num_experts_per_tok": 1}

# Kind -> config class and its fields.
_CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "mistral_window": (transformers.MistralConfig, {}),
    # Two layers of each type.
    "gemma2": (transformers.Gemma2Config, {**_SOFTCAPS, "num_hidden_layers": 4}),
    "gpt2": (transformers.GPT2Config, {}),
    "bloom": (transformers.BloomConfig, {}),
}

# Every test of a whole call runs for these kinds. `MORE_KINDS` are used only in
# `tests/generation/test_models.py`.
TINY_FAMILIES: tuple[str, ...] = tuple(_CONFIGS)

_CONFIGS |= {
    "cohere2": (transformers.Cohere2Config, _ALTERNATING),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {"num_key_value_heads": 4, "q_lora_rank": 16, "n_group": 2, "first_k_dense_replace": 1},
    ),
    "falcon": (transformers.FalconConfig, {}),
    "falcon_alibi": (transformers.FalconConfig, {"alibi": True}),
    "gemma3": (transformers.Gemma3TextConfig, _ALTERNATING),
    "gemma3n": (transformers.Gemma3nTextConfig, {**_SHARED, **_ALTUP}),
    "gemma4": (transformers.Gemma4TextConfig, {**_SHARED, "global_head_dim": 8}),
    "gpt_neo": (
        transformers.GPTNeoConfig,
        {"attention_types": [[["global", "local"], 1]], "window_size": SLIDING_WINDOW},
    ),
    "gpt_oss": (transformers.GptOssConfig, _ROPE),
    "llama4": (
        transformers.Llama4TextConfig,
        {**_CHUNKED, **_ONE_EXPERT, "intermediate_size_mlp": 48},
    ),
    "mixtral": (transformers.MixtralConfig, {}),
    "mpt": (transformers.MptConfig, {}),
    "opt": (transformers.OPTConfig, {}),
    "phi": (transformers.PhiConfig, {}),
    "phi3": (transformers.Phi3Config, {}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {}),
}
MORE_FAMILIES: tuple[str, ...] = tuple(family for family in _CONFIGS if family not in TINY_FAMILIES)
_CONFIGS |= recurrent_configs()


def make_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Make a tiny config for a kind in `KINDS`; `overrides` are fields of the config."""
    if family not in _CONFIGS:
        raise ValueError(f"kind must be one of {sorted(_CONFIGS)}, got {family!r}")
    config_class, fields = _CONFIGS[family]
    return fill(config_class, **{**fields, **overrides})


def _clamp_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keep an additive float64 mask finite in float32.

    Eager attention adds the lowest float64 number and then computes softmax in float32, where that
    number is -inf. A padded query, which sees nothing, would become NaN. No released checkpoint
    runs in float64.
    """
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dtype == torch.float64:
        kwargs = {**kwargs, "attention_mask": mask.clamp_min(torch.finfo(torch.float32).min)}
    return args, kwargs


def clamp_masks(model: PreTrainedModel) -> None:
    """Make every attention layer of the model clamp its mask."""
    for name, module in model.named_modules():
        if name.endswith((".self_attn", ".self_attention", ".SelfAttention")):
            module.register_forward_pre_hook(_clamp_mask, with_kwargs=True)


def make_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    vocab_size: int = 64,
    attn_implementation: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Make a tiny random causal language model in eval mode; `overrides` are config fields.

    The same arguments give the same weights, drawn in float64 and then rounded. torch's global
    generator is left unchanged. No text ends early unless the caller sets an EOS id. Gemma 2 and
    Bloom compute the attention softmax in float32 for every dtype.
    """
    if attn_implementation is None and family == "gemma2":
        # transformers 5.17 chooses SDPA, which leaves out the softcapping
        attn_implementation = "eager"
    config = make_config(family, vocab_size=vocab_size, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The grouped matrix product for experts does not run in float64.
        options = {"attn_implementation": attn_implementation, "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **options).eval()
    model.requires_grad_(False)
    if family in RECURRENT_FAMILIES:
        vary_vectors(model)
    model.get_output_embeddings().weight.mul_(LOGIT_SCALE)
    clamp_masks(model)
    model.to(dtype)
    model.config.dtype = dtype
    model.generation_config = GenerationConfig(pad_token_id=PAD_TOKEN_ID, do_sample=False)
    return model


def vary_vectors(model: PreTrainedModel) -> None:
    """Add noise to biases, decays and norms, whose initial constants would hide errors."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim < 2:
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 0.1)


def make_small_model(
    vocab_size: int = 8, *, sharpness: float = 1.0, **options: Any
) -> PreTrainedModel:
    """Make a Llama of width 16, small enough for the joint distribution of a few tokens.

    `sharpness` multiplies the logits: 0 makes distributions uniform, 1 gives an entropy of 1 to 1.6
    nats at V = 8.
    """
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = make_model(
        "llama", vocab_size=vocab_size, **{"num_hidden_layers": 1, **sizes, **options}
    )
    model.get_output_embeddings().weight.mul_(sharpness / LOGIT_SCALE)
    return model


def noisy_copy(model: PreTrainedModel, scale: float = 0.05, seed: int = 1) -> PreTrainedModel:
    """Copy a model and add Gaussian noise to its weights, which makes a draft that is mostly right.

    `scale` is the standard deviation of the noise relative to that of each weight; 0 gives an exact
    copy.
    """
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for weight in draft.parameters():
        if weight.ndim < 2 or weight.data_ptr() in seen:
            continue  # norms and biases start as constants, so relative noise would be zero
        seen.add(weight.data_ptr())
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.add_((noise * scale * weight.double().std().cpu()).to(weight))
    return draft


_CONTEXTS = (
    "max_position_embeddings",
    "max_target_positions",
    "max_decoder_position_embeddings",
    "max_seq_len",
)


def with_context(model: PreTrainedModel, num_tokens: int, **fields: Any) -> PreTrainedModel:
    """Return a `cut_copy` with position tables that end after `num_tokens`."""
    return cut_copy(model, **dict.fromkeys(_CONTEXTS, num_tokens), **fields)


def cheaper_copy(model: PreTrainedModel, scale: float = 0.05) -> PreTrainedModel:
    """Return a noisy copy of a Llama with two fewer units per layer, so that "adaptive" drafts."""
    return noisy_copy(cut_copy(model, intermediate_size=model.config.intermediate_size - 2), scale)


def cut_copy(model: PreTrainedModel, **fields: Any) -> PreTrainedModel:
    """Copy a model with other `fields` in its text config and the leading part of each weight.

    Fields that the config does not have are ignored.
    """
    config = copy.deepcopy(model.config)
    # In encoder-decoders, this is a copy.
    for section in (config, config.get_text_config(decoder=True)):
        for name, value in fields.items():
            if hasattr(section, name):
                setattr(section, name, value)
    smaller = type(model)(config).to(model.dtype).eval().requires_grad_(False)
    weights = dict(model.named_parameters())
    for name, weight in smaller.named_parameters():
        weight.copy_(weights[name][tuple(slice(size) for size in weight.shape)])
    smaller.generation_config = copy.deepcopy(model.generation_config)
    clamp_masks(smaller)
    return smaller


def ragged_prompts(
    batch_size: int,
    *,
    seed: int = 0,
    min_len: int = 3,
    max_len: int = 12,
    vocab_size: int = 64,
    pad_token_id: int = PAD_TOKEN_ID,
) -> dict[str, Tensor]:
    """Return left-padded random prompts of different lengths, as keywords with [B, T] int64.

    With two rows or more, the shortest prompt has `min_len` tokens and the longest has `max_len`.
    No real token is `pad_token_id`.
    """
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(min_len, max_len + 1, (batch_size,), generator=generator)
    if batch_size > 1:
        shortest, longest = torch.randperm(batch_size, generator=generator)[:2].tolist()
        lens[shortest], lens[longest] = min_len, max_len
    width = int(lens.max())
    token_ids = torch.randint(0, vocab_size - 1, (batch_size, width), generator=generator)
    token_ids = token_ids + (token_ids >= pad_token_id)  # every id except the padding id
    attention_mask = (torch.arange(width) >= width - lens[:, None]).long()  # [B, T]
    input_ids = torch.where(
        attention_mask.bool(), token_ids, torch.full_like(token_ids, pad_token_id)
    )
    return {"input_ids": input_ids, "attention_mask": attention_mask}
