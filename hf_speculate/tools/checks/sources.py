"""Describe a model without its weights: config, tokenizer, generation config, and sizes."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.tools.checks.cost_model import ModelSize, size_of

ModelSource = PreTrainedModel | PreTrainedConfig | str | Path
_AUTO_CLASSES: tuple[tuple[Any, Any], ...] = (
    (AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    (transformers.AutoModelForImageTextToText, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (transformers.AutoModelForSeq2SeqLM, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
)
# defaults for configs without `bits`
_BITS = {"awq": 4, "fp8": 8, "fbgemm_fp8": 8, "gptq": 4, "mxfp4": 4}


class Described(NamedTuple):
    """The description of a model without its weights."""

    role: str  # "target" or "draft"
    name: str  # name or path, or the class if it has neither
    model: PreTrainedModel  # the passed model, or a model on the meta device
    config: PreTrainedConfig  # config of the decoder
    size: ModelSize  # size of its parameters after loading
    dtype: str  # dtype of its parameters after loading, without "torch."
    quantisation: str  # name of the quantisation method; empty if there is none
    tokenizer: PreTrainedTokenizerBase | None  # None if none was found
    eos_token_ids: frozenset[int]


def describe(
    role: str,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype_name: str | None,
    options: Mapping[str, Any],
) -> Described:
    """Describe a model without loading its weights.

    Args:
        role: "target" or "draft", for error messages.
        source: a model, a config, or the name or path of a model.
        tokenizer: the model's tokenizer. None loads the tokenizer next to the config.
        dtype_name: dtype of the weights after loading. None or "auto" uses the config's dtype.
        options: options of `from_pretrained`.
    """
    source = unwrapped(source, role)
    if isinstance(source, PreTrainedModel):
        model, config, generation_config = source, source.config, source.generation_config
        name, dtype, bytes_per_param = (
            config.name_or_path or type(model).__name__,
            model.dtype,
            None,
        )
    else:
        config = read_config(role, source, options)
        name = (
            str(source)
            if isinstance(source, str | Path)
            else config.name_or_path or type(config).__name__
        )
        model = meta_model(role, config, **options)
        generation_config = (
            _load_or_none(transformers.GenerationConfig, name, options) or model.generation_config
        )
        load_dtype = getattr(config, "dtype", None) if dtype_name in (None, "auto") else dtype_name
        load_dtype = getattr(torch, load_dtype) if isinstance(load_dtype, str) else load_dtype
        dtype = load_dtype if isinstance(load_dtype, torch.dtype) else torch.bfloat16
        bytes_per_param = _bytes_per_param(config, dtype)
    decoder_config = config.get_text_config(decoder=True)
    eos = getattr(generation_config, "eos_token_id", None)  # `generate()` reads it first
    eos = getattr(decoder_config, "eos_token_id", None) if eos is None else eos
    return Described(
        role,
        name,
        model,
        decoder_config,
        size_of(model, bytes_per_param, dtype.itemsize),
        str(dtype).removeprefix("torch."),
        str(_quantisation(config).get("quant_method", "")),
        tokenizer
        if tokenizer is not None
        else _load_or_none(transformers.AutoTokenizer, name, options),
        frozenset(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]),
    )


def read_config(role: str, source: object, options: Mapping[str, Any]) -> PreTrainedConfig:
    if isinstance(source, PreTrainedConfig):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"{role} must be a model, a config, a name or a path, got {type(source).__name__}; "
            "pass one of these"
        )
    try:
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(source, **options)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{role} must be of an architecture that this transformers knows, got {str(source)!r} "
            f"({str(error).partition('. ')[0]}); update transformers, pass trust_remote_code, or "
            "name another model"
        ) from error
    except OSError as error:
        where = "in the local cache" if options.get("local_files_only") else "on the Hub"
        raise ConfigError(
            f"{role} must be a folder with a config.json or the name of a model {where}, got "
            f"{str(source)!r}; "
            "check the spelling, the network and your access to the model"
        ) from error
    return config


def _load_or_none(auto_class: Any, name: str, options: Mapping[str, Any]) -> Any:
    try:
        return auto_class.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, ImportError):  # the files are missing or unreadable
        return None


def meta_model(
    role: str, config: PreTrainedConfig, *, trust_remote_code: bool = False, **_: Any
) -> PreTrainedModel:
    classes = [auto_class for auto_class, mapping in _AUTO_CLASSES if type(config) in mapping]
    if (
        trust_remote_code
        and not classes
        and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    ):
        classes = [AutoModelForCausalLM]
    if not classes:
        raise UnsupportedModelError(
            f"{role} must have a language modelling head, got a {type(config).__name__}; name a "
            "causal language model"
        )
    options: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    with torch.device("meta"):  # eager attention needs no optional package
        model: PreTrainedModel = classes[0].from_config(
            copy.deepcopy(config), attn_implementation="eager", **options
        )
    return model


def _quantisation(config: PreTrainedConfig) -> dict[str, Any]:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return {}
    fields: dict[str, Any] = dict(settings) if isinstance(settings, dict) else settings.to_dict()
    return {"quant_method": "an unnamed method", **fields}


def _bytes_per_param(config: PreTrainedConfig, dtype: torch.dtype) -> float:
    settings = _quantisation(config)
    if not settings:
        return float(dtype.itemsize)
    bits = settings.get("bits") or (4 if settings.get("load_in_4bit") else None)
    return float(bits or _BITS.get(settings["quant_method"], 8)) / 8
