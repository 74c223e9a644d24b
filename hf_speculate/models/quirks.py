"""Tested model types, and limitations of individual types.

A model of an untested type, or of a class outside transformers, is compared with plain decoding in
its first speculative call; see `hf_speculate.options.self_test.compare`.
"""

from enum import Enum
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from hf_speculate.compat import is_tested_since

_KNOWN_ROOTS = ("transformers", "torch", "hf_speculate")  # packages whose module classes are known
_GROWING_TYPES = ("dynamic", "longrope")


class Limit(Enum):
    """Kinds of limitations, by the code they affect."""

    NOT_SUPPORTED = "generation.validate_models refuses the model"
    ONLY_PREALLOCATED = "models.cache_kinds: layers with windows need preallocated buffers"
    ONLY_DYNAMIC = "models.cache_kinds: the cache is dynamic"
    MASK_PER_ROW = "models.cache_kinds: rows that are alike get a mask each"
    LOGITS_BY_COUNT = "models.language_model: logits_to_keep is a count, never a tensor of indices"
    DISTANCES_ONLY = (
        "models.language_model: rows may be shifted, though the model takes no position_ids"
    )
    NO_ATTENTIONS_FROM_SDPA = (
        "generation.validate_models refuses output_attentions unless the attention is eager"
    )
    NO_PADDED_DECODER_PROMPT = (
        "generation.validate_models refuses masked tokens in a decoder prompt"
    )
    CONTEXT_BY_COLUMNS = "models.context: the columns of the longest row count for all rows"
    PADDING_HAS_NO_POSITION = (
        "engine.draft_session: drafted tokens behind a padding token do not count"
    )


class Quirk(NamedTuple):
    """A limitation of one model type."""

    model_type: str
    limit: Limit
    reason: str  # predicate about the model's layers or its forward


QUIRKS = (
    Quirk("blt", Limit.NOT_SUPPORTED, "cut into patches what one forward reads"),
    Quirk("cpmant", Limit.NOT_SUPPORTED, "read the whole text anew for every token"),
    Quirk("fsmt", Limit.NOT_SUPPORTED, "see the tokens that follow where they read several"),
    Quirk(
        "git",
        Limit.NOT_SUPPORTED,
        "keep pictures in the cache that take no place in the text or its mask",
    ),
    Quirk(
        "glm_image",
        Limit.NOT_SUPPORTED,
        "place tokens on a grid that is counted from the prompt's end",
    ),
    Quirk(
        "idefics",
        Limit.NOT_SUPPORTED,
        "read with every token what an earlier forward made of the pictures",
    ),
    Quirk("kosmos-2", Limit.NOT_SUPPORTED, "place tokens by counting those that are no padding"),
    Quirk("kosmos-2.5", Limit.NOT_SUPPORTED, "place tokens by counting those that are no padding"),
    Quirk("prophetnet", Limit.NOT_SUPPORTED, "read one token at a time"),
    Quirk(
        "qwen2_5_omni_talker",
        Limit.NOT_SUPPORTED,
        "place tokens by what the model keeps from its last forward",
    ),
    Quirk(
        "moshi", Limit.ONLY_PREALLOCATED, "its window layers read all that a dynamic cache holds"
    ),
    Quirk("imagegpt", Limit.ONLY_DYNAMIC, "its forward reads the attention mask as [B, T]"),
    Quirk("mllama", Limit.ONLY_DYNAMIC, "its cache holds the states of pictures too"),
    Quirk("mllama_text_model", Limit.ONLY_DYNAMIC, "its cache holds the states of pictures too"),
    Quirk("falcon", Limit.NO_ATTENTIONS_FROM_SDPA, "its plain prompt then sees later tokens"),
    Quirk(
        "led",
        Limit.NO_PADDED_DECODER_PROMPT,
        "its plain decoding reads single tokens without a mask",
    ),
    Quirk(
        "nllb-moe",
        Limit.NO_PADDED_DECODER_PROMPT,
        "tokens that it reads together go to other experts",
    ),
    Quirk("xglm", Limit.MASK_PER_ROW, "its attention wants a mask of shape [B, 1, Q, T]"),
    Quirk("bloom", Limit.DISTANCES_ONLY, "its attention adds biases by distance"),
    Quirk("mpt", Limit.DISTANCES_ONLY, "its attention adds biases by distance"),
    *(
        Quirk(name, Limit.CONTEXT_BY_COLUMNS, "its attention cuts a table of fixed size by columns")
        for name in ("gpt_neo", "imagegpt", "mpt")
    ),
    *(
        Quirk(
            name,
            Limit.PADDING_HAS_NO_POSITION,
            "its forward counts no padding tokens among those it reads together",
        )
        for name in (
            "m2m_100",
            "nllb-moe",
            "seamless_m4t",
            "seamless_m4t_v2",
            "speech_to_text",
            "trocr",
        )
    ),
    *(
        Quirk(
            name,
            Limit.LOGITS_BY_COUNT,
            "layers that share states leave out what a count of logits leaves out",
        )
        for name in ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
    ),
)

_SINCE_OLDEST = """
apertus arcee audioflamingo3 aya_vision bart bigbird_pegasus biogpt blenderbot blenderbot-small
bloom codegen cohere cohere2 cohere2_vision cosmos3_omni ctrl deepseek_v3 deepseek_vl ernie4_5
exaone4 exaone4_5 falcon fun_asr_nano fuyu gemma gemma2 gemma3_text gemma3n_text gemma4_text glm
glm4 glm46v glm4v_text glmasr got_ocr2 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite
granite_speech granite_speech_plus granitemoe helium hunyuan_v1_dense idefics2 idefics3 imagegpt
internvl janus jetmoe kimi_k25 led lighton_ocr llama llama4_text llava llava_next llava_next_video
llava_onevision longt5 m2m_100 marian mbart ministral mistral mistral3 mixtral mllama
mllama_text_model mpt mt5 musicflamingo mvp nemotron nllb-moe olmo olmo2 olmo3 olmoe opt ovis2
pegasus pegasus_x persimmon phi phi3 phi4_multimodal phimoe plbart qianfan_ocr qwen2 qwen2_5_vl
qwen2_5_vl_text qwen2_audio qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_asr qwen3_moe qwen3_vl_text
seed_oss smollm3 smolvlm stablelm starcoder2 switch_transformers t5 t5_gemma_module t5gemma t5gemma2
t5gemma2_decoder trocr umt5 vibevoice_asr video_llava vipllava voxtral whisper xglm
bamba falcon_h1 falcon_mamba granitemoehybrid inkling_text jamba kimi_linear lfm2 lfm2_moe mamba
mamba2 nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe_text qwen3_5_text qwen3_next zamba zamba2 zaya
"""
_SINCE_5_23 = "bailing_hybrid hyperclovax hyperclovax_vision_v2 lfm3"
_SINCE_5_24 = "moss_transcribe_diarize omniasr"
# Model type -> oldest tested version of transformers; `compat` holds the newest one.
TESTED_TYPES = dict.fromkeys(_SINCE_OLDEST.split(), "5.17.0") | dict.fromkeys(
    _SINCE_5_23.split(), "5.23.0"
)
TESTED_TYPES |= dict.fromkeys(_SINCE_5_24.split(), "5.24.0")


# Packages in `transformers.models` whose models take a dict of masks by layer type as
# `attention_mask`.
_MASK_BY_TYPE_NAMES = """
afmoe axk2 bailing_hybrid bamba beam cohere2 cohere2_moe cohere_compass cwm deepseek_v32
diffusion_gemma dory dots1 exaone4 exaone_moe falcon_h1 flint gemma2 gemma3 gemma3n gemma4
gemma4_unified glm5_next glm_moe_dsa gpt_oss granite_swa granitemoe_swa granitemoehybrid hy_v4
hy_v4_vl inkling inkling2 inkling2_loop jamba kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe
lfm3 llama4 mellum mimo_v2_flash minimax ministral modernbert_decoder muse_glimmer muse_spark
nemotron_h olmo3 olmo_hybrid qwen2 qwen2_5_omni qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5
qwen3_5_moe qwen3_next qwen3_omni_moe qwen4_exp smollm3 step3p7 unlimited_ocr vaultgemma zamba
zamba2 zaya
"""
# Packages of models that compare the name of the attention with "sdpa". Any other name changes
# their mask or code path.
_COMPARES_ATTENTION_NAMES = """
axk2 deepseek_v32 dots3_note falcon gemma4 gemma4_unified glm5_next glm_moe_dsa hy_v4 hy_v4_vl
minimax_m3_vl mistral_large4
"""

_MASK_BY_TYPE = frozenset(_MASK_BY_TYPE_NAMES.split())
_COMPARES_ATTENTION = frozenset(_COMPARES_ATTENTION_NAMES.split())


def takes_mask_by_type(model: PreTrainedModel) -> bool:
    """Return whether the model takes a dict of masks by layer type; False outside transformers."""
    return _package_of(type(model.base_model)) in _MASK_BY_TYPE


def may_compare_attention(module_class: type[nn.Module]) -> bool:
    """Return whether a class may compare the name of the attention; True outside transformers."""
    bases = [base for base in module_class.__mro__ if issubclass(base, nn.Module)]
    is_foreign = any(base.__module__.partition(".")[0] not in _KNOWN_ROOTS for base in bases)
    return is_foreign or not _COMPARES_ATTENTION.isdisjoint(_package_of(base) for base in bases)


def _package_of(module_class: type) -> str:
    """Return the package of a class in `transformers.models`; empty for other classes."""
    parts = module_class.__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else ""


def limit_reason(model: PreTrainedModel, limit: Limit) -> str:
    """Return why a limitation applies to the types of a model; empty if it does not apply."""
    types = model_types(model)
    return next(
        (quirk.reason for quirk in QUIRKS if quirk.limit is limit and quirk.model_type in types), ""
    )


def token_without_position(model: PreTrainedModel) -> int | None:
    """Return the padding id if it shifts the positions of later tokens in a forward; else None."""
    if not limit_reason(model, Limit.PADDING_HAS_NO_POSITION):
        return None
    pad: int | None = model.config.get_text_config(decoder=True).pad_token_id
    return pad


def model_types(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the type of the model and the type of its text decoder."""
    types = (model.config.model_type, model.config.get_text_config(decoder=True).model_type)
    return tuple(dict.fromkeys(types))


def is_known_type(model: PreTrainedModel) -> bool:
    """Return whether the test suite covers the model's type with any version of transformers."""
    is_of_transformers = type(model).__module__.startswith("transformers.models.")
    return is_of_transformers and all(name in TESTED_TYPES for name in model_types(model))


def is_tested_type(model: PreTrainedModel) -> bool:
    """Return whether the test suite covers the model's type with this version of transformers."""
    return is_known_type(model) and all(
        is_tested_since(TESTED_TYPES[name]) for name in model_types(model)
    )


def growing_rope(model: PreTrainedModel) -> tuple[str, int] | None:
    """Return the type and maximum length of a growing rotary embedding; None for other types.

    Past this length, its frequencies change, even for cached tokens.
    """
    config = model.config.get_text_config(decoder=True)
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)] or [
        parameters
    ]
    for rope in by_layer_type:
        if rope.get("rope_type") in _GROWING_TYPES:
            return rope["rope_type"], rope.get(
                "original_max_position_embeddings"
            ) or config.max_position_embeddings
    return None
