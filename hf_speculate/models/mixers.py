"""Finds the mixers of a model, which write its recurrent states, and why they cannot be rolled back."""

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from hf_speculate.cache.layers import is_recurrent
from hf_speculate.models.language_model import CACHE_NAMES
from hf_speculate.models.mixer_probe import probed
from hf_speculate.models.mixer_steps import Mixer, StepProtocol

# Types of layers to which older versions of transformers give a recurrent layer of the cache that stays empty.
_WITHOUT_STATES = ("mlp", "moe")


class SteppedModel(NamedTuple):
    """The mixers of a model, each with how its class reads one token."""

    mixers: Sequence[tuple[Mixer, StepProtocol]]
    obstacle: str  # why they cannot be rolled back; empty if they can

    @property
    def num_bytes(self) -> int:
        """Of all states of one row."""
        return sum(protocol.num_bytes for _, protocol in self.mixers)


def stepped_model(model: PreTrainedModel, cache: Cache) -> SteppedModel:
    """The mixers of a model.

    Args:
        model: with recurrent layers.
        cache: its states.
    """
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    found: list[tuple[Mixer, StepProtocol]] = []
    by_class: dict[type[nn.Module], StepProtocol | str] = {}
    mixers = _mixers_by_layer(model)
    for index, layer in enumerate(cache.layers):
        is_empty = index < len(types) and types[index] in _WITHOUT_STATES
        if is_empty or not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        num_before = len(found)
        for mixer in mixers[index]:
            kind = type(mixer.module)
            if "forward" in vars(mixer.module):
                return _unserved(kind, "has a forward of its own (accelerate moves its weights, or a kernel runs it)")
            protocol = by_class[kind] if kind in by_class else probed(mixer, layer.number_of_states)
            by_class[kind] = protocol
            if isinstance(protocol, str):
                return _unserved(kind, protocol)
            if protocol.slots:
                found.append((mixer, protocol))
        if len(found) == num_before:
            return SteppedModel([], f"whose layer {index} keeps its states otherwise than in the cache it is given")
    return SteppedModel(found, "")


def recurrent_cache(model: PreTrainedModel) -> Cache | None:
    """An empty cache, as transformers makes it for a model; None if none of its layers is recurrent."""
    try:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    except (KeyError, AttributeError, TypeError, ValueError):  # a config that says nothing of a cache's layers
        return None
    return cache if is_recurrent(cache) else None


def rollback_obstacle(model: PreTrainedModel, is_stateful: bool) -> str:
    """Why the recurrent states of a model cannot be rolled back; empty if they can, or if it has none.

    Args:
        model: any model.
        is_stateful: whether transformers says that it has recurrent states.
    """
    cache = recurrent_cache(model)
    if cache is None:
        return "of its own kind" if is_stateful else ""
    if (getattr(model, "tp_size", None) or 1) > 1:
        return "and split by tensor parallelism, which is not supported for recurrent layers"
    if any(vars(module).get("_compiled_call_impl") is not None for module in model.modules()):
        return "and compiled in place, where no hooks can be put on its modules"
    return stepped_model(model, cache).obstacle


def _mixers_by_layer(model: PreTrainedModel) -> dict[int, list[Mixer]]:
    """Modules with a convolution that take hidden states and a cache, of which they use one layer."""
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


def _unserved(kind: type[nn.Module], why: str) -> SteppedModel:
    return SteppedModel([], f"whose {kind.__name__} {why}")
