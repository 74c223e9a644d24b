"""Copy between transformers' static and dynamic caches.

A static cache cannot be rolled back row by row.
"""

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_speculate.cache.layers import attention_layers, fixed_layers, holding, text_cache, window_of
from hf_speculate.cache.static import parts_of
from hf_speculate.errors import UnsupportedGenerationError, counted


def dynamic_copy(cache: Cache, config: PreTrainedConfig) -> Cache:
    """Make a dynamic cache whose states are views of a static cache, which is never written to."""
    copies = []
    for source in parts_of(cache):
        copy = DynamicCache(config=config)
        for layer, static in zip(holding(copy.layers), holding(source.layers), strict=True):
            num_tokens = int(static.get_seq_length())
            if not num_tokens:
                continue
            window = window_of(layer)
            end = min(num_tokens, static.max_cache_len)  # a window layer holds its newest tokens
            start = 0 if window is None else max(end - window + 1, 0)
            layer.lazy_initialization(static.keys, static.values)
            layer.keys, layer.values = static.keys[:, :, start:end], static.values[:, :, start:end]
            if window is not None:
                layer.cumulative_length = num_tokens
        copies.append(copy)
    return copies[0] if len(copies) == 1 else EncoderDecoderCache(*copies)


def static_copy(cache: Cache, config: PreTrainedConfig, max_cache_len: int) -> Cache:
    """Copy a dynamic cache to a new static cache with room for `max_cache_len` tokens."""
    lens = [max_cache_len, *(int(source.get_seq_length()) for source in parts_of(cache)[1:])]
    copies = [StaticCache(config=config, max_cache_len=length) for length in lens]
    layers: list[Any] = text_cache(cache).layers
    for index in fixed_layers(config):
        if layers[index].is_initialized:  # as long as the states of the images
            copies[0].layers[index] = StaticLayer(max_cache_len=layers[index].keys.shape[2])
    copy = copies[0] if len(copies) == 1 else EncoderDecoderCache(*copies)
    write_back(cache, copy)
    for source, layer in zip(
        holding(text_cache(cache).layers), holding(text_cache(copy).layers), strict=True
    ):
        if isinstance(source, LinearAttentionCacheLayerMixin):
            vars(layer).update(
                (name, getattr(source, name)) for name in vars(LinearAttentionLayer())
            )
    return copy


def write_back(cache: Cache, static: Cache) -> None:
    """Update a static cache in place with a dynamic cache's states; undo this after an error."""
    # The oldest column of a full window is not written, because the next token drops it unread.
    layers: list[list[Any]] = [
        [
            layer
            for source_part in parts_of(any_cache)
            for layer in attention_layers(source_part.layers)
        ]
        for any_cache in (cache, static)
    ]
    pairs = [
        (source, layer) for source, layer in zip(*layers, strict=True) if source.is_initialized
    ]
    for source, layer in pairs:
        if (
            not isinstance(layer, StaticSlidingWindowLayer)
            and _num_tokens(source) > layer.max_cache_len
        ):
            raise UnsupportedGenerationError(
                "every layer of a StaticCache must have room for its states, got "
                f"{counted(layer.max_cache_len, 'column')} for {_num_tokens(source)}; leave the "
                "cache out, or make "
                "layers of pictures as long as what they hold"
            )
    initialized = [layer for _, layer in pairs if layer.is_initialized]
    windows: list[Any] = [
        layer for layer in initialized if isinstance(layer, StaticSlidingWindowLayer)
    ]
    # the other layers only gain columns
    before = [(layer.keys.clone(), layer.values.clone()) for layer in windows]
    try:
        for source, layer in pairs:
            if not layer.is_initialized:
                layer.lazy_initialization(source.keys, source.values)
            end = min(_num_tokens(source), layer.max_cache_len)
            start = max(end - source.keys.shape[2], 0)
            if not isinstance(layer, StaticSlidingWindowLayer):
                start = min(int(layer.get_seq_length()), end)
            num_new = end - start
            for buffer, states in ((layer.keys, source.keys), (layer.values, source.values)):
                buffer[:, :, start:end] = states[:, :, states.shape[2] - num_new :]
    except BaseException:
        for layer, (keys, values) in zip(windows, before, strict=True):
            layer.keys[:], layer.values[:] = keys, values
        raise
    for source, layer in pairs:
        layer.cumulative_length.fill_(min(_num_tokens(source), layer.max_cache_len))
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = _num_tokens(source)
    if isinstance(static, EncoderDecoderCache) and isinstance(cache, EncoderDecoderCache):
        static.is_updated.update(cache.is_updated)


def room_in(cache: Cache, config: PreTrainedConfig) -> int | None:
    """Return the capacity of a static cache in tokens; None if it has only window layers."""
    layers = zip(
        holding(DynamicCache(config=config).layers), holding(parts_of(cache)[0].layers), strict=True
    )
    capacities = [
        int(static.max_cache_len)
        for index, (layer, static) in enumerate(layers)
        if index not in fixed_layers(config) and static.max_cache_len != window_of(layer)
    ]
    return min(capacities, default=None)


def _num_tokens(layer: Any) -> int:
    """Return the number of tokens that a dynamic layer has seen."""
    return (
        layer.cumulative_length
        if isinstance(layer, DynamicSlidingWindowLayer)
        else int(layer.keys.shape[2])
    )
