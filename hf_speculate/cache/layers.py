"""Layers of a transformers cache: which ones hold states of the text, their windows, and snapshots of them."""

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

# Stands for a layer that reads the states of an earlier one; older versions end the cache before the first of these.
_WITHOUT_STATES: Any = getattr(cache_utils, "DummyLayer", ())
ATTENTION_LAYERS: tuple[type, ...] = (DynamicLayer, DynamicSlidingWindowLayer)
# Types of layers that only attend; those of a config that names none are among them.
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# A layer with an attention of its own holds keys and values beside its recurrent states.
RECURRENT_LAYERS: tuple[type, ...] = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def text_cache(cache: Cache) -> Cache:
    """The cache of the text's own states: what an encoder gave is another's, and never rolled back."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def holding(layers: Iterable[Any]) -> list[Any]:
    """The layers of a cache that hold states, now or after a later forward."""
    return [layer for layer in layers if not isinstance(layer, _WITHOUT_STATES)]


def fixed_layers(config: PreTrainedConfig) -> frozenset[int]:
    """The layers of a text config that hold what the prompt's pictures gave, which grows with no token."""
    layers = getattr(config, "cross_attention_layers", None) or ()
    return frozenset(layer for layer in layers if layer < config.num_hidden_layers)  # a cut model keeps the list


def check_layers(cache: Cache, types: Sequence[type]) -> None:
    """Raise an error for a cache with a layer of no other type than these, which can be rolled back row by row."""
    for layer in holding(cache.layers):
        if type(layer) not in types:
            raise UnsupportedModelError(
                f"the cache's layers must be {' or '.join(layer_type.__name__ for layer_type in types)}, "
                f"got {type(layer).__name__}; decode with this cache plainly"
            )


def attention_layers(layers: Iterable[Any]) -> list[Any]:
    """The layers of a cache that hold keys and values, with or without recurrent states."""
    return [layer for layer in holding(layers) if isinstance(layer, CacheLayerMixin)]


def is_recurrent(cache: Cache) -> bool:
    """Whether a layer of a cache holds convolution or recurrent states."""
    # One or two types: to ask each layer would be visible in the time of a call of a deep model.
    layer_types = set(map(type, text_cache(cache).layers))
    return any(issubclass(layer_type, LinearAttentionCacheLayerMixin) for layer_type in layer_types)


def only_attends(config: PreTrainedConfig) -> bool:
    """Whether a decoder's config names layers of attention alone: no cache need be made to see their types."""
    return set(getattr(config, "layer_types", None) or ()) <= _ATTENTION_TYPES


def num_cached(cache: Cache) -> int:
    """Number of columns of a cache; 0 if it has recurrent layers only, which do not count their tokens."""
    if is_recurrent(cache) and not attention_layers(cache.layers):
        return 0
    return int(cache.get_seq_length())


def window_of(layer: Any) -> int | None:
    """Window of a cache's layer: the tokens that it attends to, the query included; None if it attends to all."""
    window: int | None = getattr(layer, "sliding_window", None)
    return window


def windows_of(config: PreTrainedConfig, cache: Cache) -> list[int | None]:
    """Windows of the model's layers; a layer that reads the states of another one has the window of its type."""
    layers = text_cache(cache).layers
    if is_recurrent(cache):
        return [window_of(layer) for layer in attention_layers(layers)]
    types = getattr(config, "layer_types", None) or []
    if len(types) <= len(holding(layers)):
        return [window_of(layer) for layer in layers]
    by_type = {layer_type: window_of(layer) for layer_type, layer in zip(types, holding(layers), strict=False)}
    return [by_type[layer_type] for layer_type in types]


def layers_snapshot(layers: list[Any], only_grows: bool) -> Callable[[], None]:
    """A function that brings layers back, in place, to what they hold now; it crops full layers that only grow."""
    saved = []
    for layer in attention_layers(layers):
        is_cropped_back = only_grows and not isinstance(layer, DynamicSlidingWindowLayer)
        states = None if is_cropped_back else (layer.keys, layer.values)
        saved.append((layer, states, layer.get_seq_length()))

    def restore() -> None:
        for later in attention_layers(layers)[len(saved) :]:  # layers that were added since
            layers.remove(later)
        for layer, states, num_columns in saved:
            if not num_columns:
                layer.keys = layer.values = None
                layer.is_initialized = False
            elif states is None:
                layer.keys, layer.values = layer.keys[..., :num_columns, :], layer.values[..., :num_columns, :]
            else:
                layer.keys, layer.values = states
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = num_columns

    return restore
