"""Settles arguments of `generate()` before transformers sees them."""

import inspect
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from hf_speculate.errors import ConfigError


def bind(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name.

    Args:
        plain: transformers' `generate`, bound.
        args: by place.
        kwargs: by name.
    """
    signature = inspect.signature(plain)
    call = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            call.update(call.pop(name, {}))
    return call


def own_stop_strings(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Turn `stop_strings` into a criterion here: transformers drops the tokenizer before it would.

    Args:
        model: whose generation config may hold them.
        call: all arguments by name; changed in place.

    Raises:
        ConfigError: there is no tokenizer.
    """
    stop_strings = _setting(model, call, "stop_strings")
    call.pop("stop_strings", None)
    if stop_strings is None:
        return
    tokenizer = call.get("tokenizer")
    if tokenizer is None:
        raise ConfigError("tokenizer must be given with stop_strings, got None; pass tokenizer= to generate()")
    criteria = StoppingCriteriaList(call.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer, stop_strings))
    call["stopping_criteria"] = criteria
    call["stop_strings"] = None


def own_static_cache(model: PreTrainedModel, call: dict[str, Any]) -> bool:
    """Whether a call asks for a static cache, which transformers is then kept from making: it cannot roll back by row.

    Args:
        model: whose generation config may ask for it.
        call: all arguments by name; changed in place.
    """
    if _setting(model, call, "cache_implementation") != "static" or call.get("past_key_values") is not None:
        return False
    call["cache_implementation"] = "dynamic"
    return True


def own_early_exit(model: PreTrainedModel, call: dict[str, Any]) -> int | None:
    """After how many layers the target is to draft for itself; transformers is kept from doing it, one row at a time.

    Args:
        model: whose generation config may ask for it.
        call: all arguments by name; changed in place.
    """
    num_layers: int | None = _setting(model, call, "assistant_early_exit")
    if num_layers is not None:
        call["assistant_early_exit"] = None
    return num_layers


def samples(model: PreTrainedModel, call: dict[str, Any]) -> bool:
    """Whether transformers will resolve `do_sample` to True: by the keyword, the passed config, the model's."""
    if "do_sample" in call:
        return bool(call["do_sample"])
    return bool(_setting(model, call, "do_sample"))


def _setting(model: PreTrainedModel, call: dict[str, Any], name: str) -> Any:
    """A field by the keyword, the passed config, the model's; None where nobody set it."""
    value = call.get(name)
    for config in (call.get("generation_config"), model.generation_config):
        if value is None and config is not None:
            value = getattr(config, name, None)
    return value
