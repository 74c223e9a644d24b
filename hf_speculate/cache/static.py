"""Static caches of users: detect them and import the module that copies them."""

import importlib
from typing import Any

from transformers.cache_utils import (
    Cache,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_speculate.cache.layers import holding

_COPIES = "hf_speculate.options.static_cache.copies"  # imported for calls with a static cache


def is_static(cache: object) -> bool:
    """Return whether a cache is a static cache that can be copied, or a pair of them."""
    return isinstance(cache, Cache) and all(
        type(part) is StaticCache
        and not part.offloading
        and all(
            type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in holding(part.layers)
        )
        for part in parts_of(cache)
    )


def static_copies() -> Any:
    """Import the module for copies between static and dynamic caches."""
    return importlib.import_module(_COPIES)


def described(cache: Cache) -> str:
    """Describe a cache by its class and the reason why it cannot be copied."""
    part = parts_of(cache)[0]
    if getattr(part, "offloading", False):
        return f"an offloaded {type(cache).__name__}"
    if type(part) is StaticCache:
        return f"one of {', '.join(sorted({type(layer).__name__ for layer in part.layers}))}"
    return type(cache).__name__


def parts_of(cache: Cache) -> list[Any]:
    """Return the cache of the text, followed by the cache of the encoder's states if any."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]
