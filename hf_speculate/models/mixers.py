"""Finds the mixers of a model, the modules that write recurrent states, and whether these can be rolled back."""

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from hf_speculate.cache.layers import is_recurrent
from hf_speculate.compat import is_stateful
from hf_speculate.models.language_model import CACHE_NAMES
from hf_speculate.models.mixer_probe import probed
from hf_speculate.models.mixer_steps import Mixer, StepProtocol

# Layer types for which older versions of transformers make a recurrent cache layer that stays empty.
_WITHOUT_STATES = ("mlp", "moe")


class SteppedModel(NamedTuple):
    """The mixers of a model, each with its protocol."""

    mixers: Sequence[tuple[Mixer, StepProtocol]]
    obstacle: str  # why their states cannot be rolled back; empty if they can

    @property
    def num_bytes(self) -> int:
        return sum(protocol.num_bytes for _, protocol in self.mixers)


def stepped_model(model: PreTrainedModel, cache: Cache) -> SteppedModel:
    """The mixers of a model, by the layers of its cache."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    found: list[tuple[Mixer, StepProtocol]] = []
    protocols: dict[Any, StepProtocol | str] = {}
    mixers = _mixers_by_layer(model)
    for index, layer in enumerate(cache.layers):
        is_empty = index < len(types) and types[index] in _WITHOUT_STATES
        if is_empty or not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        num_before = len(found)
        for mixer in mixers[index]:
            if "forward" in vars(mixer.module):
                return _unserved(mixer, "has a replaced forward (accelerate moves its weights, or a kernel runs it)")
            kind = type(mixer.module), _numbers_of(mixer.module)
            protocol = protocols.get(kind) or probed(mixer, layer.number_of_states)
            protocols[kind] = protocol
            if isinstance(protocol, str):
                return _unserved(mixer, protocol)
            if protocol.slots:
                found.append((mixer, protocol))
        if len(found) == num_before:
            return SteppedModel([], f"whose layer {index} does not keep its states in the cache")
    return SteppedModel(found, "")


def recurrent_cache(model: PreTrainedModel) -> Cache | None:
    """An empty cache of the model; None if no layer is recurrent."""
    try:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    except (KeyError, AttributeError, TypeError, ValueError):  # a config that does not describe a cache
        return None
    return cache if is_recurrent(cache) else None


def rollback_obstacle(model: PreTrainedModel) -> str:
    """Why the recurrent states of a model cannot be rolled back; empty if they can, or if there are none."""
    cache = recurrent_cache(model)
    if cache is None:
        return "outside a transformers cache" if is_stateful(model) else ""
    if (getattr(model, "tp_size", None) or 1) > 1:
        return "and split by tensor parallelism, which is not supported for recurrent layers"
    if any(vars(module).get("_compiled_call_impl") is not None for module in model.modules()):
        return "and compiled in place, which prevents hooks on its modules"
    return stepped_model(model, cache).obstacle


def _mixers_by_layer(model: PreTrainedModel) -> dict[int, list[Mixer]]:
    """Modules with a convolution that take hidden states and a cache and have a layer index, by that index."""
    found: dict[int, list[Mixer]] = defaultdict(list)
    for module in model.modules():
        index = vars(module).get("layer_idx")
        if not isinstance(index, int) or not any(isinstance(child, nn.Conv1d) for child in module.children()):
            continue
        hidden, *others = list(inspect.signature(type(module).forward).parameters.values())[1:]
        names = [parameter.name for parameter in others]
        cache_name = next((name for name in CACHE_NAMES if name in names), "")
        needed: list[Any] = [one for one in others if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
        if cache_name and all(parameter.name == cache_name for parameter in needed):
            masks = tuple(name for name in names if "mask" in name)
            found[index].append(Mixer(module, index, hidden.name, cache_name, masks))
    return found


def _numbers_of(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Sizes, flags and the index of its state in the cache layer; modules of one class share a protocol if equal."""
    return tuple(
        (name, value) for name, value in vars(module).items() if isinstance(value, int) and name != "layer_idx"
    )


def _unserved(mixer: Mixer, why: str) -> SteppedModel:
    return SteppedModel([], f"whose {type(mixer.module).__name__} {why}")
