"""Notes what a transformers cache holds, to bring it back after an error."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_speculate.cache.layers import attention_layers


class LayerSnapshot(NamedTuple):
    """One layer's states by reference; None where cropping to the length is enough."""

    keys: Tensor | None
    values: Tensor | None
    num_columns: int


def snapshot_layers(layers: Iterable[Any], only_grows: bool) -> tuple[LayerSnapshot, ...]:
    """What `restore_layers` needs; `only_grows` if full layers keep their first columns, so that a length will do."""
    snapshots = []
    for layer in attention_layers(layers):
        is_cropped_back = only_grows and not isinstance(layer, DynamicSlidingWindowLayer)
        keys, values = (None, None) if is_cropped_back else (layer.keys, layer.values)
        snapshots.append(LayerSnapshot(keys, values, layer.get_seq_length()))
    return tuple(snapshots)


def restore_layers(layers: list[Any], snapshots: Sequence[LayerSnapshot]) -> None:
    """Bring layers back to their snapshots, in place; those that came later go."""
    held = attention_layers(layers)
    for later in held[len(snapshots) :]:
        layers.remove(later)
    for layer, kept in zip(held, snapshots, strict=False):
        if not kept.num_columns:
            layer.keys = layer.values = None
            layer.is_initialized = False
        elif kept.keys is not None:
            layer.keys, layer.values = kept.keys, kept.values
        else:
            layer.keys = layer.keys[..., : kept.num_columns, :]
            layer.values = layer.values[..., : kept.num_columns, :]
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = kept.num_columns
