"""Recurrent layers: detect them and check whether their states can be rolled back."""

import importlib

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_speculate.cache.layers import is_recurrent, only_attends
from hf_speculate.compat import is_stateful

_MIXERS = "hf_speculate.options.recurrent.mixers"  # imported for a model with recurrent layers


def recurrent_cache(model: PreTrainedModel) -> Cache | None:
    """Return an empty cache for the model; None if no layer is recurrent."""
    config = model.config.get_text_config(decoder=True)
    if only_attends(config):
        return None
    try:
        cache = DynamicCache(config=config)
    # the config does not describe a cache
    except (KeyError, AttributeError, TypeError, ValueError):
        return None
    return cache if is_recurrent(cache) else None


def rollback_obstacle(model: PreTrainedModel) -> str:
    """Return why recurrent states cannot be rolled back; empty if they can or there are none."""
    cache = recurrent_cache(model)
    if cache is None:
        return "outside a transformers cache" if is_stateful(model) else ""
    return str(importlib.import_module(_MIXERS).rollback_obstacle(model, cache))


def reads_prompts_in_chunks(model: PreTrainedModel) -> bool:
    """Return whether the output is independent of how a prompt is split into forwards.

    Recurrent layers may lose earlier states in a forward of several tokens, or compute single
    tokens differently.
    """
    cache = recurrent_cache(model)
    return cache is None or bool(
        importlib.import_module(_MIXERS).stepped_model(model, cache).reads_at_once
    )


def reads_prompts_otherwise(model: PreTrainedModel) -> bool:
    """Return whether one forward over several tokens computes other states than single steps.

    The result is False if such a forward loses earlier states.
    """
    cache = recurrent_cache(model)
    if cache is None:
        return False
    stepped = importlib.import_module(_MIXERS).stepped_model(model, cache)
    return bool(stepped.continues and not stepped.reads_at_once)
