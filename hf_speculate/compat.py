"""Every use of a private name of transformers, in one place, with the versions they were tested with."""

from collections.abc import Sequence
from typing import Any

import transformers
from transformers import CompileConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel, StaticCache

from hf_speculate.errors import UnsupportedModelError

TESTED_VERSIONS = "5.17.0 to 5.23.0"
_OF_MODELS = ("_is_stateful", "_valid_auto_compile_criteria", "_default_compile_config")
_OF_STEPS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample")
_OF_CONFIGS = ("_attn_implementation", "_attn_implementation_internal")
_OF_GENERATION_CONFIGS = ("_from_model_config",)
_OF_PREPARED_CONFIGS = ("_pad_token_tensor",)  # which `generate` gives its copy of a generation config


def check_private_names(model: PreTrainedModel) -> None:
    """See that the model has what is read of it here.

    Args:
        model: about to be enabled, or to decode.

    Raises:
        UnsupportedModelError: a name is missing.
    """
    _check(
        (model, (*_OF_MODELS, *_OF_STEPS)),
        (model.config, _OF_CONFIGS),
        (model.generation_config, _OF_GENERATION_CONFIGS),
    )


def _check(*holders: tuple[object, Sequence[str]]) -> None:
    missing = [f"{type(one).__name__}.{name}" for one, names in holders for name in names if not hasattr(one, name)]
    if missing:
        raise UnsupportedModelError(
            f"transformers must have {', '.join(missing)}, which {transformers.__version__} lacks; hf_speculate was "
            f"tested with {TESTED_VERSIONS}: install one of these"
        )


def own_steps(model: PreTrainedModel) -> list[str]:
    """Names of what a class from outside transformers does in its own way in each step of plain `generate`."""
    return [name for name in _OF_STEPS if not getattr(type(model), name).__module__.startswith("transformers.")]


def stateful_names(models: Sequence[PreTrainedModel]) -> list[str]:
    """Class names of the models that transformers calls stateful."""
    return [type(one).__name__ for one in models if one._is_stateful]


def adapters_by_row(model: PreTrainedModel) -> bool:
    """Whether PEFT has hooks in the model that give each row of the batch its own adapter."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks)


def attention_name(config: PreTrainedConfig) -> str | None:
    """The attention implementation that layers with this config look up at every forward."""
    name: str | None = config._attn_implementation
    return name


def set_attention_name(config: PreTrainedConfig, name: str) -> None:
    """Set it on this config alone; the public setter would write to nested configs too."""
    config._attn_implementation_internal = name


def compile_config_of(model: PreTrainedModel, config: GenerationConfig) -> CompileConfig | None:
    """The compile config of plain `generate` with a static cache; None if it would not compile the model."""
    probe = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=1)
    is_valid: Any = model._valid_auto_compile_criteria
    default: Any = model._default_compile_config
    if not is_valid({"past_key_values": probe}, config):
        return None
    found: CompileConfig = config.compile_config or default()
    return found


def pad_token_id(config: GenerationConfig) -> int | None:
    """What ended rows are filled with, as `generate` settled it for the call.

    Raises:
        UnsupportedModelError: the config lacks the name.
    """
    _check((config, _OF_PREPARED_CONFIGS))
    pad = config._pad_token_tensor
    return None if pad is None else int(pad)


def comes_from_model_config(config: GenerationConfig) -> bool:
    """Whether transformers made it from a model's config, and will again when it is loaded."""
    return bool(config._from_model_config)
