"""Buffer pool: preallocated KV buffers are kept between calls, so that CUDA graphs find them at the same addresses."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.types import KVState

# Of one model's idle buffers: a quarter of its weights, which is 32,768 tokens of a Llama with 8 billion parameters in
# half precision, and at least as much as for 8,192 of them.
MIN_POOLED_BYTES = 1 << 30
POOLED_SHARE = 4


class PooledBuffers(NamedTuple):
    """The buffers of all layers, with what goes with them."""

    layers: list[KVState]  # each [B, H, capacity, D]
    graphs: dict[Hashable, Any]  # captured over these buffers, so that they are of no use without them

    @property
    def tensors(self) -> list[Tensor]:
        return [part for layer in self.layers for part in layer]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)


class BufferStore:
    """The buffers of one model that no call has taken; the ones that were used last are kept."""

    def __init__(self, max_bytes: int = MIN_POOLED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._idle: OrderedDict[Hashable, PooledBuffers] = OrderedDict()

    def take(self, key: Hashable) -> PooledBuffers | None:
        """The buffers of all layers under a key; None if there are none."""
        with self._lock:
            return self._idle.pop(key, None)

    def give_back(self, key: Hashable, buffers: PooledBuffers) -> None:
        """Keep buffers for a later call; the ones unused for longest are dropped past `max_bytes`."""
        with self._lock:
            self._idle.setdefault(key, buffers)
            self._idle.move_to_end(key)
            while sum(kept.num_bytes for kept in self._idle.values()) > self._max_bytes:
                self._idle.popitem(last=False)

    def addresses(self) -> list[int]:
        with self._lock:
            return [tensor.data_ptr() for kept in self._idle.values() for tensor in kept.tensors]


def max_pooled_bytes(num_weight_bytes: int) -> int:
    """Bytes of idle buffers that are kept for a model of so many bytes."""
    return max(num_weight_bytes // POOLED_SHARE, MIN_POOLED_BYTES)


@dataclass(frozen=True)
class BufferPool:
    """The buffers of one shape in a model's store."""

    store: BufferStore  # of the model
    batch_size: int  # B
    capacity: int  # columns of each buffer
    dtype: torch.dtype  # of the model
    device: torch.device  # of the model

    def take(self, num_layers: int) -> PooledBuffers | None:
        """Buffers of all layers, filled with zeros; None if there are none, and the caller makes its own."""
        found = self.store.take(self._key)
        if found is None or len(found.layers) != num_layers:
            return None
        for buffer in found.tensors:
            buffer.zero_()  # masked columns must not be NaN
        return found

    def give_back(self, buffers: PooledBuffers) -> None:
        """Keep buffers for a later call, unless rows have left the batch."""
        if {(tensor.shape[0], tensor.shape[2]) for tensor in buffers.tensors} == {(self.batch_size, self.capacity)}:
            self.store.give_back(self._key, buffers)

    @property
    def _key(self) -> Hashable:
        """What interchangeable buffers have in common; inference tensors cannot be written to in other modes."""
        return self.batch_size, self.capacity, self.dtype, self.device, torch.is_inference_mode_enabled()
