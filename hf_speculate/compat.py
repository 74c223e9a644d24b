"""Wrappers for private names of transformers and for names that differ between its versions."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)

from hf_speculate.errors import UnsupportedModelError

_OLDEST, _NEWEST = "5.17.0", "5.24.0"
# Since transformers 5.24, models and `generate` take the cache as `cache`.
TAKES_CACHE = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters

OLD_CACHE_NAMES = ("past_key_values", "cache_params")
CACHE_NAMES = ("cache", *OLD_CACHE_NAMES) if TAKES_CACHE else OLD_CACHE_NAMES
"""Names of the cache argument in models and `generate`, the usual one first.

The usual name is `cache` since transformers 5.24.
"""
CACHE_NAME = CACHE_NAMES[0]

_OF_MODELS = ("_is_stateful", "_valid_auto_compile_criteria", "_default_compile_config", "_sample")
_OF_CONFIGS = ("_attn_implementation", "_attn_implementation_internal")
_OF_GENERATION_CONFIGS = ("_from_model_config",)
# attributes that `generate` sets on its copy of a generation config
_OF_PREPARED_CONFIGS = ("_pad_token_tensor",)


def check_private_names(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` if a private name that this module reads is missing."""
    _check(
        (model, _OF_MODELS),
        (model.config, _OF_CONFIGS),
        (model.generation_config, _OF_GENERATION_CONFIGS),
    )


def _check(*holders: tuple[object, Sequence[str]]) -> None:
    missing = [
        f"{type(holder).__name__}.{name}"
        for holder, names in holders
        for name in names
        if not hasattr(holder, name)
    ]
    if missing:
        raise UnsupportedModelError(
            f"transformers must have {', '.join(missing)}, which {transformers.__version__} lacks; "
            "hf_speculate was "
            f"tested with {_OLDEST} to {_NEWEST}: install one of these"
        )


def is_tested_since(version: str) -> bool:
    """Return whether transformers is at least this minor version and not newer than tested."""
    return _minor(version) <= _minor(transformers.__version__) and not is_newer_than_tested()


def is_newer_than_tested() -> bool:
    """Return whether the minor version of transformers is newer than the newest tested one."""
    return _minor(transformers.__version__) > _minor(_NEWEST)


def version_note(model_class: type) -> str:
    """Return a warning for a class if transformers is newer than tested; otherwise empty."""
    if not is_newer_than_tested():
        return ""
    return (
        f"hf_speculate was tested with transformers {_OLDEST} to {_NEWEST}, got "
        f"{transformers.__version__}; the first "
        f"speculative call compares {model_class.__name__} with plain decoding and raises if they "
        "differ; install "
        f"transformers=={_NEWEST} to be sure"
    )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def has_own_loop(model: PreTrainedModel) -> bool:
    """Return whether the model's class overrides the decoding loop of `GenerationMixin`."""
    model_class: Any = type(model)
    return model_class._sample is not GenerationMixin._sample


def plain_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    prepared: tuple[LogitsProcessorList, StoppingCriteriaList, GenerationConfig],
    **model_kwargs: Any,
) -> Any:
    """Decode prompts [B, T] int64 in the loop of `GenerationMixin`, and return its output."""
    decode: Any = model._sample
    return decode(input_ids, *prepared, **model_kwargs)


class PlainSteps(NamedTuple):
    """Output of plain greedy decoding."""

    token_ids: Tensor  # [B, N + 1] int64, new tokens
    logits: Tensor  # [B, N + 1, V] float32, logits of each token


def plain_steps(
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    num_steps: int,
) -> PlainSteps:
    """Decode prompts [B, T] int64 greedily for `num_steps` steps after the prefill.

    The function uses the loop of `GenerationMixin` and advances the cache.
    """
    config = copy.copy(generation_config)
    for name in ("do_sample", "output_scores", "output_hidden_states", "output_attentions"):
        setattr(config, name, False)
    config.return_dict_in_generate = config.output_logits = True
    num_prompt = input_ids.shape[1]
    decode: Any = model._sample
    output = decode(
        input_ids,
        logits_processor=LogitsProcessorList(),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(num_prompt + num_steps + 1)]),
        generation_config=config,
        **model_kwargs,
    )
    return PlainSteps(output.sequences[:, num_prompt:], torch.stack(output.logits, dim=1))


def is_stateful(model: PreTrainedModel) -> bool:
    """Return whether transformers marks the model as stateful."""
    return bool(model._is_stateful)


def attention_name(config: PreTrainedConfig) -> str | None:
    """Return the attention implementation for layers with this config."""
    name: str | None = config._attn_implementation
    return name


def set_attention_name(config: PreTrainedConfig, name: str) -> None:
    """Set the attention implementation of this config.

    The public setter would also write to nested configs.
    """
    config._attn_implementation_internal = name


def compile_config_of(model: PreTrainedModel, config: GenerationConfig) -> CompileConfig | None:
    """Return the compile config that plain `generate` uses with a static cache.

    The result is None if plain `generate` does not compile the model.
    """
    probe = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=1)
    is_valid: Any = model._valid_auto_compile_criteria
    default: Any = model._default_compile_config
    if not is_valid({CACHE_NAME: probe}, config):
        return None
    compile_config: CompileConfig = config.compile_config or default()
    return compile_config


def pad_token_id(config: GenerationConfig) -> int | None:
    """Return the padding token that `generate` prepared for finished rows; None without one."""
    _check((config, _OF_PREPARED_CONFIGS))
    pad = config._pad_token_tensor
    return None if pad is None else int(pad)


def comes_from_model_config(config: GenerationConfig) -> bool:
    """Return whether transformers derived the generation config from a model's config."""
    return bool(config._from_model_config)
