"""Model types that the test suite has shown, and what single types cannot do.

A model whose type is not in `SHOWN`, or whose class lies outside transformers, is compared with plain decoding at its
first speculative call, see `hf_speculate.generation.self_test`.
"""

from enum import Enum
from typing import NamedTuple

from transformers import PreTrainedModel

from hf_speculate.compat import is_tested_since


class Limit(Enum):
    """Where a quirk matters."""

    NOT_SUPPORTED = "generation.validate_models refuses the model"
    ONLY_PREALLOCATED = "models.cache_selection: layers with windows need preallocated buffers"
    ONLY_DYNAMIC = "models.cache_selection: the cache is dynamic"
    MASK_PER_ROW = "models.cache_selection: rows that are alike get a mask each"
    LOGITS_BY_COUNT = "models.language_model: logits_to_keep is a count, never a tensor of places"
    DISTANCES_ONLY = "models.language_model: rows may be shifted, though the model takes no position_ids"
    NO_PADDED_DECODER_PROMPT = "generation.validate_models refuses masked tokens in a decoder prompt"
    PADS_TAKE_NO_PLACE = "engine.draft_session: drafted tokens behind a padding token do not count"


class Quirk(NamedTuple):
    """What models of one type cannot do."""

    model_type: str
    limit: Limit
    reason: str  # its subject is the model's layers, or its forward


QUIRKS = (
    Quirk("blt", Limit.NOT_SUPPORTED, "cut into patches what one forward reads"),
    Quirk("cpmant", Limit.NOT_SUPPORTED, "read the whole text anew for every token"),
    Quirk("fsmt", Limit.NOT_SUPPORTED, "see the tokens that follow where they read several"),
    Quirk("git", Limit.NOT_SUPPORTED, "keep pictures in the cache that take no place in the text or its mask"),
    Quirk("glm_image", Limit.NOT_SUPPORTED, "place tokens on a grid that is counted from the prompt's end"),
    Quirk("idefics", Limit.NOT_SUPPORTED, "read with every token what an earlier forward made of the pictures"),
    Quirk("kosmos-2", Limit.NOT_SUPPORTED, "place tokens by counting those that are no padding"),
    Quirk("kosmos-2.5", Limit.NOT_SUPPORTED, "place tokens by counting those that are no padding"),
    Quirk("prophetnet", Limit.NOT_SUPPORTED, "read one token at a time"),
    Quirk("qwen2_5_omni_talker", Limit.NOT_SUPPORTED, "place tokens by what the model keeps from its last forward"),
    Quirk("moshi", Limit.ONLY_PREALLOCATED, "its window layers read all that a dynamic cache holds"),
    Quirk("imagegpt", Limit.ONLY_DYNAMIC, "its forward reads the attention mask as [B, T]"),
    Quirk("mllama", Limit.ONLY_DYNAMIC, "its cache holds the states of pictures too"),
    Quirk("mllama_text_model", Limit.ONLY_DYNAMIC, "its cache holds the states of pictures too"),
    Quirk("led", Limit.NO_PADDED_DECODER_PROMPT, "its plain decoding reads single tokens without a mask"),
    Quirk("nllb-moe", Limit.NO_PADDED_DECODER_PROMPT, "tokens that it reads together go to other experts"),
    Quirk("xglm", Limit.MASK_PER_ROW, "its attention wants a mask of shape [B, 1, Q, T]"),
    Quirk("bloom", Limit.DISTANCES_ONLY, "its attention adds biases by distance"),
    Quirk("mpt", Limit.DISTANCES_ONLY, "its attention adds biases by distance"),
    *(
        Quirk(name, Limit.PADS_TAKE_NO_PLACE, "its forward counts no padding tokens among those it reads together")
        for name in ("m2m_100", "nllb-moe", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "trocr")
    ),
    *(
        Quirk(name, Limit.LOGITS_BY_COUNT, "layers that share states leave out what a count of logits leaves out")
        for name in ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
    ),
)

_SINCE_OLDEST = """
apertus arcee bart bigbird_pegasus biogpt blenderbot blenderbot-small bloom codegen cohere cohere2 ctrl deepseek_v3
ernie4_5 exaone4 exaone4_5 falcon fuyu gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 gpt2 gpt_bigcode
gpt_neo gpt_neox gpt_oss gptj granite granitemoe helium hunyuan_v1_dense idefics3 imagegpt jetmoe led llama
llama4_text llava llava_next longt5 m2m_100 marian mbart ministral mistral mixtral mllama mllama_text_model mpt mt5
mvp nemotron nllb-moe olmo olmo2 olmo3 olmoe opt pegasus pegasus_x persimmon phi phi3 phi4_multimodal phimoe plbart
qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_audio qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_moe seed_oss smollm3
stablelm starcoder2 switch_transformers t5 t5_gemma_module t5gemma t5gemma2 t5gemma2_decoder trocr umt5 vibevoice_asr
whisper xglm
"""
# The oldest version of transformers with which tests have shown a type; the newest is that of `compat`.
SHOWN = dict.fromkeys(_SINCE_OLDEST.split(), "5.17.0") | {"hyperclovax": "5.23.0", "hyperclovax_vision_v2": "5.23.0"}


def limit_reason(model: PreTrainedModel, limit: Limit) -> str:
    """Why a limit holds for a model; empty if it does not.

    Args:
        model: by whose config, or text decoder's config, the type is known.
        limit: one of the limits.
    """
    types = model_types(model)
    return next((quirk.reason for quirk in QUIRKS if quirk.limit is limit and quirk.model_type in types), "")


def placeless_id(model: PreTrainedModel) -> int | None:
    """The token behind which others of the same forward are read at wrong positions; None if there is none."""
    if not limit_reason(model, Limit.PADS_TAKE_NO_PLACE):
        return None
    pad: int | None = model.config.get_text_config(decoder=True).pad_token_id
    return pad


def model_types(model: PreTrainedModel) -> tuple[str, ...]:
    """The model's type and its text decoder's."""
    types = (model.config.model_type, model.config.get_text_config(decoder=True).model_type)
    return tuple(dict.fromkeys(types))


def is_shown(model: PreTrainedModel) -> bool:
    """Whether tests have shown, with this version of transformers, that the model's type decodes as plain `generate`.

    Args:
        model: of a class of transformers; others count as unknown, whatever type their config names.
    """
    if not type(model).__module__.startswith("transformers.models."):
        return False
    return all(name in SHOWN and is_tested_since(SHOWN[name]) for name in model_types(model))
