"""Pooled buffers: preallocated KV buffers shared by calls, and the protocol of their pool."""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_speculate.types import KVState


class PooledBuffers(NamedTuple):
    """Buffers of all layers, with their graphs."""

    layers: list[KVState]  # each [B, H, capacity, D]
    graphs: dict[Hashable, Any]  # captured over these buffers only

    @property
    def tensors(self) -> list[Tensor]:
        return [part for layer in self.layers for part in layer]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)


class BufferShape(NamedTuple):
    """Shape shared by interchangeable buffers of a model."""

    batch_size: int  # B
    capacity: int | None  # columns of each buffer
    dtype: torch.dtype
    device: torch.device


class Pool(Protocol):
    """Buffers of one model between calls."""

    def take(self, shape: BufferShape, num_layers: int) -> PooledBuffers | None:
        """Take zeroed buffers of all layers.

        The result is None if there are none, and the caller makes new ones.
        """

    def give_back(self, shape: BufferShape, buffers: PooledBuffers) -> None:
        """Keep buffers for a later call."""
