"""Attention names: put our attention into a model's configs during a call, and take it out again.

Models look their attention function up by the name in a config, in every forward. During a call,
the configs of a model have one of our names instead:

- for "sdpa", the function folds heads (`folded_attention`);
- for a name of flash attention, which takes no mask of four dimensions, the function computes
  attention under such a mask as for "sdpa", and otherwise calls flash attention. A prompt, and a
  forward of another thread on the same model, is computed as in plain `generate`.
"""

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_speculate.compat import attention_name, set_attention_name
from hf_speculate.models.folded_attention import (
    STANDS_FOR,
    folded_attention,
    is_chosen,
    prepare,
)
from hf_speculate.models.module_walk import modules_of, parameters_of
from hf_speculate.models.quirks import may_compare_attention
from hf_speculate.models.text_decoder import text_decoder

_PREFIX = "hf_speculate_folded:"  # begins our names in transformers' registries
FOLDED = _PREFIX + STANDS_FOR

_LOCK = threading.Lock()
# Id of a config -> the running calls that have set our name in it.
_HOLDERS: dict[int, set[object]] = {}


@contextmanager
def folded_attention_for(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Set our functions in the attention layers of `models`, and restore the names afterwards.

    If several calls run at once, the last one restores the name. Only configs with "sdpa" or flash
    attention are changed. A name assigned by the caller in the meantime is kept; that of flash
    attention then fails on our masks.
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


def mask_obstacle(model: PreTrainedModel) -> str:
    """Return why the model's attention cannot take masks [B, 1, Q, T]; empty if it can."""
    name = _name_before(model.config.get_text_config(decoder=True))
    if name in ("eager", STANDS_FOR):
        return ""
    if not is_flash(name):
        return f"its attention is {name}"
    reason = _flash_configs(model)[1]
    return f"its attention is {name}, and {reason}" if reason else ""


def is_flash(name: str | None) -> bool:
    """Return whether a name stands for transformers' function for all kinds of flash attention."""
    return (
        ALL_ATTENTION_FUNCTIONS.get(name) is flash_attention_forward
        and ALL_MASK_ATTENTION_FUNCTIONS.get(name) is flash_attention_mask
    )


def register_folded_attention(name: str = STANDS_FOR) -> str:
    """Register our function for an attention with transformers, and return our name for it.

    Later calls have no effect.
    """
    ours = _PREFIX + name
    if ours not in ALL_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(ours, partial(_make_mask, name))
        AttentionInterface.register(
            ours, folded_attention if name == STANDS_FOR else partial(_attend, name)
        )
    return ours


def _make_mask(name: str, *args: Any, **kwargs: Any) -> Any:
    """Make the mask with the function registered for `name` at the time of the call."""
    make: Any = ALL_MASK_ATTENTION_FUNCTIONS[name]
    return make(*args, **kwargs)


class _Renamed:
    """View of an object with some other attributes."""

    def __init__(self, original: Any, **attributes: Any):
        vars(self).update(attributes, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _attend(
    name: str,
    module: nn.Module,
    query: Tensor,  # [B, g*H, Q, D]
    key: Tensor,  # [B, H, T, D]
    value: Tensor,  # [B, H, T, D']
    attention_mask: Tensor | None,  # ours [B, 1, Q, T], or that of flash attention, [B, T] or None
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with `folded_attention` under our masks, otherwise with flash attention."""
    if attention_mask is not None and attention_mask.ndim == 4:
        return folded_attention(module, query, key, value, attention_mask, **kwargs)
    is_causal = kwargs.get("is_causal")
    if getattr(module, "is_causal", True) if is_causal is None else is_causal:
        prepare(query, key, value)
    attend: Any = ALL_ATTENTION_FUNCTIONS[name]
    # flash attention is loaded by the name in the layer's config
    layer = _Renamed(module, config=_Renamed(module.config, _attn_implementation=name))
    result: tuple[Tensor, None] = attend(layer, query, key, value, attention_mask, **kwargs)
    return result


def _hold(config: PreTrainedConfig, call: object) -> None:
    with _LOCK:
        name = _name_before(config)
        if name is None or (name != STANDS_FOR and not is_flash(name)):
            return
        ours = register_folded_attention(name)
        _HOLDERS.setdefault(id(config), set()).add(call)
        try:
            set_attention_name(config, ours)
        except AttributeError:  # a frozen config stays unchanged
            del _HOLDERS[id(config)]


def _release(config: PreTrainedConfig, call: object) -> None:
    """Undo `_hold`; do nothing if `_hold` was not called, for example after an interrupt."""
    with _LOCK:
        holders = _HOLDERS.get(id(config), set())
        if call not in holders:
            return
        holders.remove(call)
        if not holders:
            del _HOLDERS[id(config)]
            name = _name_before(config)
            if name is not None and name != attention_name(config):
                set_attention_name(config, name)


def _name_before(config: PreTrainedConfig) -> str | None:
    """Return the config's attention, without our name.

    A config has our name during another call, and so has a copy made during a call.
    """
    name = attention_name(config)
    return None if name is None else name.removeprefix(_PREFIX)


def _configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configs that name our functions during a call.

    They are those of flash attention in the text decoder, and those with "sdpa" of grouped
    attention layers, or of all attention layers on CUDA. No configs are returned if the model's
    code may compare the name of the attention.
    """
    takes_all = is_chosen({parameter.device for parameter in parameters_of(model)})
    if is_flash(_name_before(model.config.get_text_config(decoder=True))):
        flash_configs, reason = _flash_configs(model)
        return [] if reason else flash_configs
    modules = modules_of(model)
    # A failed getattr() on a module costs more than the rest of the search; vars() avoids it.
    layers = [
        module
        for module in modules
        if (takes_all and "config" in vars(module))
        or ("num_key_value_groups" in vars(module) and _num_groups(module) > 1)
    ]
    configs = {
        id(config): config
        for layer in layers
        if (config := getattr(layer, "config", None)) is not None
    }
    served = [
        config
        for config in configs.values()
        if isinstance(config, PreTrainedConfig) and _name_before(config) == STANDS_FOR
    ]
    if not served:
        return []
    owners = [module for module in modules if isinstance(module, PreTrainedModel)]
    return [] if _may_compare_names([*layers, *owners]) else served


def _flash_configs(model: PreTrainedModel) -> tuple[list[PreTrainedConfig], str]:
    """Return the text decoder's configs with flash attention.

    The second result says why SDPA cannot compute its attention; it is empty if SDPA can.
    """
    decoder = text_decoder(model)
    owners = [module for module in modules_of(decoder) if "config" in vars(module)]
    configs = {
        id(config): config
        for owner in owners
        if isinstance(config := vars(owner)["config"], PreTrainedConfig)
        and is_flash(_name_before(config))
    }
    reason, name = "", type(decoder).__name__
    if _may_compare_names([model, *owners]):
        reason = f"the code of {name} may compare that name"
    # Some releases declare classes with soft caps as supporting SDPA.
    elif not decoder._supports_sdpa or any(
        getattr(config, "attn_logit_softcapping", None) for config in configs.values()
    ):
        reason = f"SDPA lacks what the attention of {name} needs"
    elif not all(map(_is_writable, configs.values())):
        reason = "its config is frozen"
    return list(configs.values()), reason


def _is_writable(config: PreTrainedConfig) -> bool:
    try:
        set_attention_name(copy.copy(config), STANDS_FOR)
    except AttributeError:
        return False
    return True


def _may_compare_names(modules: Sequence[nn.Module]) -> bool:
    classes = {type(module) for module in modules}
    return any(may_compare_attention(module_class) for module_class in classes)


def _num_groups(module: nn.Module) -> int:
    groups = vars(module)["num_key_value_groups"]
    return groups if isinstance(groups, int) else 1
