"""Buffer pool: preallocated KV buffers are kept between calls, so that CUDA graphs find them at the same addresses."""

import threading
from collections import OrderedDict
from collections.abc import Hashable

import torch
from torch import nn

from hf_speculate.cache.pooled_buffers import BufferShape, PooledBuffers
from hf_speculate.model_state import model_state
from hf_speculate.models.module_walk import weight_bytes

# Idle buffers of one model: a quarter of its weights, which is 32,768 tokens of a Llama with 8 billion parameters in
# half precision, and at least as much as for 8,192 of them.
MIN_POOLED_BYTES = 1 << 30
POOLED_SHARE = 4


class BufferPool:
    """The buffers of one model that no call has taken; the ones that were used last are kept."""

    def __init__(self, max_bytes: int = MIN_POOLED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._idle: OrderedDict[Hashable, PooledBuffers] = OrderedDict()

    @classmethod
    def of(cls, model: nn.Module) -> "BufferPool":
        """The idle buffers of a model, whose weights bound them."""
        return model_state(model).get(cls, lambda: cls(max_pooled_bytes(model)))

    def take(self, shape: BufferShape, num_layers: int) -> PooledBuffers | None:
        """Buffers of all layers, filled with zeros; None if there are none, and the caller makes its own."""
        with self._lock:
            buffers = self._idle.pop(_key(shape), None)
        if buffers is None or len(buffers.layers) != num_layers:
            return None
        for buffer in buffers.tensors:
            buffer.zero_()  # masked columns must not be NaN
        return buffers

    def give_back(self, shape: BufferShape, buffers: PooledBuffers) -> None:
        """Keep buffers for a later call, unless rows have left; those unused for longest go past `max_bytes`."""
        if {(tensor.shape[0], tensor.shape[2]) for tensor in buffers.tensors} != {shape[:2]}:
            return
        with self._lock:
            self._idle.setdefault(_key(shape), buffers)
            self._idle.move_to_end(_key(shape))
            while sum(kept.num_bytes for kept in self._idle.values()) > self._max_bytes:
                self._idle.popitem(last=False)


def max_pooled_bytes(model: nn.Module) -> int:
    """Bytes of idle buffers that are kept for a model."""
    return max(sum(map(weight_bytes, model.parameters())) // POOLED_SHARE, MIN_POOLED_BYTES)


def _key(shape: BufferShape) -> Hashable:
    return shape, torch.is_inference_mode_enabled()  # whose tensors cannot be written to in other modes
