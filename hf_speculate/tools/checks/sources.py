"""Reads what is said about a model without its weights: config, tokenizer, generation config."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.tools.checks.gains import ModelSize, size_of

ModelSource = PreTrainedModel | PreTrainedConfig | str | Path
_AUTO_CLASSES: tuple[tuple[Any, Any], ...] = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
)
_BITS = {"awq": 4, "fp8": 8, "fbgemm_fp8": 8, "gptq": 4, "mxfp4": 4}  # where a quantisation config names none


@dataclass(frozen=True)
class Described:
    """One model, as far as its small files tell.

    Args:
        role: "target" or "draft".
        name: its name or path, else its class.
        model: with weights where they were passed, else on the meta device.
        size: what its parameters weigh.
        quantisation: name of the method; empty: none.
        tokenizer: None where none was found.
        eos_token_ids: ids that end a text; empty: none.
    """

    role: str
    name: str
    model: PreTrainedModel
    size: ModelSize
    quantisation: str
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]

    @property
    def config(self) -> PreTrainedConfig:
        """That of the decoder."""
        config: PreTrainedConfig = self.model.config.get_text_config(decoder=True)
        return config


def describe(role: str, source: ModelSource, tokenizer: PreTrainedTokenizerBase | None) -> Described:
    """Read all that is known of a model; from local files only, and no weights.

    Args:
        role: "target" or "draft", for messages.
        source: the model, its config, or a name or path whose small files are on this machine.
        tokenizer: the model's; None: it is looked for beside the config.

    Raises:
        ConfigError: no config is found.
        UnsupportedModelError: no language model can be made from the config.
    """
    get_base_model = getattr(source, "get_base_model", None)
    if callable(get_base_model) and not isinstance(source, PreTrainedModel):
        source = get_base_model()
    if isinstance(source, PreTrainedModel):
        model, config, generation_config = source, source.config, source.generation_config
        name = config.name_or_path or type(model).__name__
        bytes_per_param = None
    else:
        config = _config(role, source)
        name = str(source) if isinstance(source, str | Path) else config.name_or_path or type(config).__name__
        model = meta_model(role, config)
        generation_config = _generation_config(name) or model.generation_config
        bytes_per_param = _bytes_per_param(config)
    decoder_config = config.get_text_config(decoder=True)
    return Described(
        role,
        name,
        model,
        size_of(model, decoder_config, bytes_per_param),
        str(_quantisation(config).get("quant_method", "")),
        tokenizer if tokenizer is not None else _tokenizer(name),
        _eos_token_ids(generation_config, decoder_config),
    )


def meta_model(role: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The config's model without memory for its weights.

    Args:
        role: for messages.
        config: left as it is.

    Raises:
        UnsupportedModelError: no language model can be made from it.
    """
    for auto_class, mapping in _AUTO_CLASSES:
        if type(config) in mapping:
            with torch.device("meta"):  # eager attention needs no package that may be missing here
                model: PreTrainedModel = auto_class.from_config(copy.deepcopy(config), attn_implementation="eager")
            return model
    raise UnsupportedModelError(
        f"{role} must have a language modelling head in transformers, got a {type(config).__name__}; "
        "name a model of AutoModelForCausalLM"
    )


def _config(role: str, source: object) -> PreTrainedConfig:
    if isinstance(source, PreTrainedConfig):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"{role} must be a model, a config, or a local name or path, got {type(source).__name__}; "
            "pass what from_pretrained gave you"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{role} must be a folder with a config.json, or a name whose config lies in the local cache, got "
            f"{str(source)!r}; download its small files first (nothing is fetched here)"
        ) from error
    return config


def _generation_config(name: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return None


def _tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError):  # no files, or none that can be read here
        return None
    return tokenizer


def _eos_token_ids(generation_config: GenerationConfig | None, config: PreTrainedConfig) -> frozenset[int]:
    """Those of the generation config, which `generate()` reads; else those of the config."""
    for holder in (generation_config, config):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset()


def _quantisation(config: PreTrainedConfig) -> dict[str, Any]:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return {}
    fields: dict[str, Any] = dict(settings) if isinstance(settings, dict) else settings.to_dict()
    return {"quant_method": "an unnamed method", **fields}


def _bytes_per_param(config: PreTrainedConfig) -> float:
    """By the config's quantisation, else its dtype, else bfloat16."""
    settings = _quantisation(config)
    if settings:
        bits = settings.get("bits") or (4 if settings.get("load_in_4bit") else None)
        return float(bits or _BITS.get(settings["quant_method"], 8)) / 8
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return float(dtype.itemsize)
