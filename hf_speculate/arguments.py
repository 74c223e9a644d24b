"""Settles arguments of `generate()` before transformers sees them."""

from typing import Any

from transformers import PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from hf_speculate.errors import ConfigError


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


def _setting(model: PreTrainedModel, call: dict[str, Any], name: str) -> Any:
    """A field by the keyword, the passed config, the model's; None where nobody set it."""
    value = call.get(name)
    for config in (call.get("generation_config"), model.generation_config):
        if value is None and config is not None:
            value = getattr(config, name)
    return value
