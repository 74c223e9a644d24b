"""Early exit: draft with the target's own first layers."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_speculate.cache.layers import attention_layers, is_recurrent, only_attends
from hf_speculate.draft.assistant_model import AssistantModel
from hf_speculate.draft.source import HistoryKey, hint_of
from hf_speculate.errors import ConfigError, UnsupportedModelError, counted
from hf_speculate.field_checks import is_int


def early_exit_model(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Return the model without its last layers.

    The new model shares the modules of the original; the final norm follows layer `num_layers`.

    Source:
        LayerSkip: Elhoushi et al. (arXiv:2404.16710).
    """
    base: Any = getattr(model, model.base_model_prefix, None)
    layers = list(getattr(base, "layers", None) or ())
    obstacle = ""
    if not layers:
        obstacle = "its layers do not lie in base_model.layers"
    elif base.config is not model.config or len(layers) != base.config.num_hidden_layers:
        obstacle = "its config is not that of its layers alone"
    elif any(
        getattr(model.config, name, None)
        for name in ("num_kv_shared_layers", "hidden_size_per_layer_input")
    ):
        obstacle = "its layers share states, or read inputs made for all of them at once"
    elif "forward" in vars(model) or "forward" in vars(base):
        obstacle = "it has a forward of its own (device_map or torch.compile)"
    if obstacle:
        raise UnsupportedModelError(
            "assistant_early_exit needs a model whose layers can be left out, got "
            f"{type(model).__name__}: {obstacle}; "
            "leave it out, or pass a draft model as assistant_model"
        )
    if not is_int(num_layers) or not 1 <= num_layers < len(layers):
        raise ConfigError(
            f"assistant_early_exit must be in 1..{len(layers) - 1} for "
            f"{counted(len(layers), 'layer')}, got "
            f"{num_layers!r}; leave it out to decode without speculation"
        )
    config = copy.copy(model.config)
    config.num_hidden_layers = num_layers
    types = getattr(config, "layer_types", None)
    if types is not None and len(types) > num_layers:  # otherwise derived from the number of layers
        config.layer_types = list(types)[:num_layers]
    if _has_recurrence_alone(config) and not _has_recurrence_alone(model.config):
        raise ConfigError(
            f"assistant_early_exit must leave an attention layer in {type(model).__name__}, got "
            f"{num_layers} recurrent "
            "ones; leave more layers"
        )
    short_base = _with_parts(base, config, {"layers": nn.ModuleList(layers[:num_layers])})
    short_model: PreTrainedModel = _with_parts(model, config, {model.base_model_prefix: short_base})
    return short_model


def _has_recurrence_alone(config: PreTrainedConfig) -> bool:
    """Return whether all layers are recurrent; such a cache does not count its tokens."""
    if only_attends(config):
        return False
    cache = DynamicCache(config=config)
    return is_recurrent(cache) and not attention_layers(cache.layers)


def _with_parts(module: nn.Module, config: PreTrainedConfig, parts: dict[str, nn.Module]) -> Any:
    """Return a shallow copy of a module, with another config and some children replaced."""
    module_copy: Any = copy.copy(module)
    state = vars(module_copy)
    # assigning a child would write to the original's table
    state["_modules"] = {**state["_modules"], **parts}
    module_copy.config = config
    return module_copy


class EarlyExit(AssistantModel):
    """Draft source for `assistant_early_exit`.

    It drafts with the first layers of the target. `resolve` makes the draft model.
    """

    argument = "assistant_early_exit"
    hint = hint_of(argument)
    model: Any = None

    def __init__(self, num_layers: int):
        self.num_layers = num_layers

    def resolve(self, target: PreTrainedModel, arguments: Mapping[str, Any]) -> "EarlyExit":
        resolved = copy.copy(self)
        resolved.model = early_exit_model(target, self.num_layers)
        resolved.eager_reason = "a model's first layers are a new draft in every call"
        return resolved

    def history_key(self) -> HistoryKey:
        return HistoryKey(None, (f"early exit after {self.num_layers} layers", False))


def make_source(target: PreTrainedModel, values: Mapping[str, Any]) -> EarlyExit:
    """Return the draft source for `assistant_early_exit`."""
    return EarlyExit(values["assistant_early_exit"])
