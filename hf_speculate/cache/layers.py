"""Layers of a transformers cache: those with states of the text, windows and snapshots."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from hf_speculate.errors import UnsupportedModelError

# Placeholder for a layer without states: it reads those of an earlier layer. Older versions end the
# cache before these.
_WITHOUT_STATES: Any = getattr(cache_utils, "DummyLayer", ())
ATTENTION_LAYERS: tuple[type, ...] = (DynamicLayer, DynamicSlidingWindowLayer)
# Types of layers with attention only. A config without types has such layers only.
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# The last two also attend: they hold keys and values beside recurrent states.
RECURRENT_LAYERS: tuple[type, ...] = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def text_cache(cache: Cache) -> Cache:
    """Return the cache of the text's states. Those of an encoder are never rolled back."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def holding(layers: Iterable[Any]) -> list[Any]:
    """Return the layers of a cache with states, now or after a later forward."""
    return [layer for layer in layers if not isinstance(layer, _WITHOUT_STATES)]


def fixed_layers(config: PreTrainedConfig) -> frozenset[int]:
    """Return the layers of a text config with states of the prompt's pictures.

    New tokens add none.
    """
    layers = getattr(config, "cross_attention_layers", None) or ()
    # a cut model keeps the list
    return frozenset(layer for layer in layers if layer < config.num_hidden_layers)


def check_layers(cache: Cache, types: Sequence[type]) -> None:
    """Raise if a layer of a cache has none of these types, the ones with rollback by row."""
    for layer in holding(cache.layers):
        if type(layer) not in types:
            raise UnsupportedModelError(
                "the cache's layers must be "
                f"{' or '.join(layer_type.__name__ for layer_type in types)}, "
                f"got {type(layer).__name__}; decode with this cache plainly"
            )


def attention_layers(layers: Iterable[Any]) -> list[Any]:
    """Return the layers of a cache with keys and values, with or without recurrent states."""
    return [layer for layer in holding(layers) if isinstance(layer, CacheLayerMixin)]


def is_recurrent(cache: Cache) -> bool:
    """Return whether a layer of a cache has convolution or recurrent states."""
    # A cache has one or two types. A check of each layer would be visible in the time of a deep
    # model's call.
    layer_types = set(map(type, text_cache(cache).layers))
    return any(issubclass(layer_type, LinearAttentionCacheLayerMixin) for layer_type in layer_types)


def only_attends(config: PreTrainedConfig) -> bool:
    """Return whether a decoder's config has attention layers only, without making a cache."""
    return set(getattr(config, "layer_types", None) or ()) <= _ATTENTION_TYPES


def num_cached(cache: Cache) -> int:
    """Count the columns of a cache; 0 for recurrent layers only, which do not count tokens."""
    if is_recurrent(cache) and not attention_layers(cache.layers):
        return 0
    return int(cache.get_seq_length())


def window_of(layer: Any) -> int | None:
    """Return the window of a layer in tokens, the query included.

    The result is None if it attends to all tokens.
    """
    window: int | None = getattr(layer, "sliding_window", None)
    return window


def windows_of(config: PreTrainedConfig, cache: Cache) -> list[int | None]:
    """Return the window of each layer of a model.

    A layer without states, reading those of another layer, has the window of its type.
    """
    layers = text_cache(cache).layers
    if is_recurrent(cache):
        return [window_of(layer) for layer in attention_layers(layers)]
    types = getattr(config, "layer_types", None) or []
    if len(types) <= len(holding(layers)):
        return [window_of(layer) for layer in layers]
    by_type = {
        layer_type: window_of(layer)
        for layer_type, layer in zip(types, holding(layers), strict=False)
    }
    return [by_type[layer_type] for layer_type in types]


def layers_snapshot(layers: list[Any], only_grows: bool) -> Callable[[], None]:
    """Return a function to restore the present states of layers, in place.

    Args:
        layers: layers of a cache. Later additions are removed.
        only_grows: whether states are only appended. Layers without a window are then cropped back.
    """
    saved_layers = []
    for layer in attention_layers(layers):
        is_cropped_back = only_grows and not isinstance(layer, DynamicSlidingWindowLayer)
        states = None if is_cropped_back else (layer.keys, layer.values)
        saved_layers.append((layer, states, layer.get_seq_length()))

    def restore() -> None:
        for added_layer in attention_layers(layers)[len(saved_layers) :]:  # layers added since
            layers.remove(added_layer)
        for layer, states, num_columns in saved_layers:
            if not num_columns:
                layer.keys = layer.values = None
                layer.is_initialized = False
            elif states is None:
                layer.keys, layer.values = (
                    layer.keys[..., :num_columns, :],
                    layer.values[..., :num_columns, :],
                )
            else:
                layer.keys, layer.values = states
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = num_columns

    return restore
