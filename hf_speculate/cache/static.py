"""Static caches that users pass: recognises them, and names the module that copies them."""

import importlib
from typing import Any

from transformers.cache_utils import Cache, EncoderDecoderCache, StaticCache, StaticLayer, StaticSlidingWindowLayer

from hf_speculate.cache.layers import holding

_COPIES = "hf_speculate.options.static_cache.copies"  # imported where a call reads a static cache, or returns one


def is_static(cache: object) -> bool:
    """Whether a cache is a static one, or a pair of these, that can be copied."""
    return isinstance(cache, Cache) and all(
        type(part) is StaticCache
        and not part.offloading
        and all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in holding(part.layers))
        for part in parts_of(cache)
    )


def static_copies() -> Any:
    """The module with the copies between static caches and dynamic ones."""
    return importlib.import_module(_COPIES)


def described(cache: Cache) -> str:
    """The class of a cache, with what sets it apart from others of the class."""
    part = parts_of(cache)[0]
    if getattr(part, "offloading", False):
        return f"an offloaded {type(cache).__name__}"
    if type(part) is StaticCache:
        return f"one of {', '.join(sorted({type(layer).__name__ for layer in part.layers}))}"
    return type(cache).__name__


def parts_of(cache: Cache) -> list[Any]:
    """The cache of the text, and that of what an encoder gave if there is one."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]
