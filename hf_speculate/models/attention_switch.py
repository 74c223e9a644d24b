"""Puts the folded attention into models' configs for the length of a call."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_speculate.compat import attention_name, set_attention_name
from hf_speculate.models.attention_backends import is_chosen
from hf_speculate.models.folded_attention import FOLDED, STANDS_FOR, register_folded_attention
from hf_speculate.models.quirks import may_compare_attention

_LOCK = threading.Lock()
_HOLDERS: dict[int, set[object]] = {}  # by the id of a config: the calls for whose sake it holds our name


@contextmanager
def folded_attention_for(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Have the attention layers of `models` look up the folded function; the last call to leave restores the name.

    Only configs that say "sdpa" are written to, and only where the function does something else than what it stands
    for: where layers share key-value heads, or where the backend of attention is chosen. What a caller assigns to a
    config in the meantime stays. The models may repeat, and may take part in other calls at the same time.
    """
    configs = {id(config): config for model in models for config in _configs_of(model)}
    call = object()
    try:
        for config in configs.values():
            _hold(config, call)
        yield
    finally:
        for config in configs.values():
            _release(config, call)


def _hold(config: PreTrainedConfig, call: object) -> None:
    with _LOCK:
        if attention_name(config) not in (STANDS_FOR, FOLDED):
            return
        register_folded_attention()
        _HOLDERS.setdefault(id(config), set()).add(call)
        try:
            set_attention_name(config, FOLDED)
        except AttributeError:  # a frozen config stays as it is
            del _HOLDERS[id(config)]


def _release(config: PreTrainedConfig, call: object) -> None:
    """Undo `_hold`; nothing where it did not take place, so that it may follow an interrupt."""
    with _LOCK:
        holders = _HOLDERS.get(id(config), set())
        if call not in holders:
            return
        holders.remove(call)
        if not holders:
            del _HOLDERS[id(config)]
            if attention_name(config) == FOLDED:
                set_attention_name(config, STANDS_FOR)


def _configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of grouped attention layers, or of all on CUDA; none if code may compare the attention's name."""
    modules = list(model.modules())
    takes_all = is_chosen(parameter.device for parameter in model.parameters())
    layers = [module for module in modules if _num_groups(module) > 1 or (takes_all and "config" in vars(module))]
    configs = [getattr(layer, "config", None) for layer in layers]
    served = [
        config
        for config in configs
        # a copy that was made while another call was running has our name
        if isinstance(config, PreTrainedConfig) and attention_name(config) in (STANDS_FOR, FOLDED)
    ]
    if not served:
        return []
    owners = [module for module in modules if isinstance(module, PreTrainedModel)]
    classes = {type(module) for module in (*layers, *owners)}
    return [] if any(may_compare_attention(one) for one in classes) else served


def _num_groups(module: nn.Module) -> int:
    groups = vars(module).get("num_key_value_groups", 1)  # a miss in getattr() costs more than the rest of the search
    return groups if isinstance(groups, int) else 1
