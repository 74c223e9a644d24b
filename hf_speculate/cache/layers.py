"""Layers of a transformers cache: layers with text states, their windows and snapshots."""

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

# Placeholder for a layer without states of its own, which reads the states of an earlier layer. In
# older versions, the cache ends before such layers.
_WITHOUT_STATES: Any = getattr(cache_utils, "DummyLayer", ())
ATTENTION_LAYERS: tuple[type, ...] = (DynamicLayer, DynamicSlidingWindowLayer)
# Types of pure attention layers. A config without layer types has only such layers.
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# The last two types also attend: they hold keys and values in addition to recurrent states.
RECURRENT_LAYERS: tuple[type, ...] = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def text_cache(cache: Cache) -> Cache:
    """Return the cache with the text states. Encoder states are never rolled back."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def holding(layers: Iterable[Any]) -> list[Any]:
    """Return the cache layers that hold states now or will hold states after a later forward."""
    return [layer for layer in layers if not isinstance(layer, _WITHOUT_STATES)]


def fixed_layers(config: PreTrainedConfig) -> frozenset[int]:
    """Return the layers of a text config with states of the images in the prompt.

    New tokens add no states to these layers.
    """
    layers = getattr(config, "cross_attention_layers", None) or ()
    # a model loaded with fewer layers than its checkpoint still has the checkpoint's full list
    return frozenset(layer for layer in layers if layer < config.num_hidden_layers)


def check_layers(cache: Cache, types: Sequence[type]) -> None:
    """Raise if a cache layer has none of `types`, the types that support per-row rollback."""
    for layer in holding(cache.layers):
        if type(layer) not in types:
            raise UnsupportedModelError(
                "the cache's layers must be "
                f"{' or '.join(layer_type.__name__ for layer_type in types)}, "
                f"got {type(layer).__name__}; decode with this cache plainly"
            )


def attention_layers(layers: Iterable[Any]) -> list[Any]:
    """Return the cache layers with keys and values, with or without recurrent states."""
    return [layer for layer in holding(layers) if isinstance(layer, CacheLayerMixin)]


def is_recurrent(cache: Cache) -> bool:
    """Return whether any cache layer has convolution or recurrent states."""
    # A cache has one or two layer types. Checking every layer of a deep model would measurably
    # slow down a call.
    layer_types = set(map(type, text_cache(cache).layers))
    return any(issubclass(layer_type, LinearAttentionCacheLayerMixin) for layer_type in layer_types)


def only_attends(config: PreTrainedConfig) -> bool:
    """Return whether a decoder's config has only attention layers, without making a cache."""
    return set(getattr(config, "layer_types", None) or ()) <= _ATTENTION_TYPES


def num_cached(cache: Cache) -> int:
    """Count the columns of a cache; 0 if all layers are recurrent, as they do not count tokens."""
    if is_recurrent(cache) and not attention_layers(cache.layers):
        return 0
    return int(cache.get_seq_length())


def window_of(layer: Any) -> int | None:
    """Return the window of a layer in tokens, including the query.

    The result is None if the layer attends to all tokens.
    """
    window: int | None = getattr(layer, "sliding_window", None)
    return window


def windows_of(config: PreTrainedConfig, cache: Cache) -> list[int | None]:
    """Return the window of each layer of a model.

    A layer that reads the states of another layer has the window of its own layer type.
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
    """Return a function that restores the current states of layers in place.

    Args:
        layers: Layers of a cache. Layers added later are removed.
        only_grows: Whether states are only appended. If so, layers without a window are cropped.
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
