"""Pooled buffers: preallocated KV buffers that outlive a call, and what a cache asks of the pool that keeps them."""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_speculate.types import KVState


class PooledBuffers(NamedTuple):
    """The buffers of all layers, with what goes with them."""

    layers: list[KVState]  # each [B, H, capacity, D]
    graphs: dict[Hashable, Any]  # captured over these buffers, and useless without them

    @property
    def tensors(self) -> list[Tensor]:
        return [part for layer in self.layers for part in layer]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)


class BufferShape(NamedTuple):
    """The shape that interchangeable buffers of a model share."""

    batch_size: int  # B
    capacity: int | None  # columns of each buffer
    dtype: torch.dtype
    device: torch.device


class Pool(Protocol):
    """Keeps the buffers of one model between calls."""

    def take(self, shape: BufferShape, num_layers: int) -> PooledBuffers | None:
        """Buffers of all layers, filled with zeros; None if there are none, and the caller makes its own."""

    def give_back(self, shape: BufferShape, buffers: PooledBuffers) -> None:
        """Keep buffers for a later call."""
