"""Pooled buffers: preallocated KV buffers shared between calls, and the protocol of their pool."""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_speculate.types import KVState


class PooledBuffers(NamedTuple):
    """Buffers of all layers, with the graphs captured over them."""

    layers: list[KVState]  # each [B, H, capacity, D]
    graphs: dict[Hashable, Any]  # valid only for these buffers

    @property
    def tensors(self) -> list[Tensor]:
        return [part for layer in self.layers for part in layer]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)


class BufferShape(NamedTuple):
    """Shape that interchangeable buffers of a model share."""

    batch_size: int  # B
    capacity: int | None  # number of columns in each buffer
    dtype: torch.dtype
    device: torch.device


class Pool(Protocol):
    """Pool that keeps the buffers of one model between calls."""

    def take(self, shape: BufferShape, num_layers: int) -> PooledBuffers | None:
        """Take zeroed buffers for all layers.

        The result is None if the pool has none. The caller then makes new buffers.
        """

    def give_back(self, shape: BufferShape, buffers: PooledBuffers) -> None:
        """Keep buffers for a later call."""
