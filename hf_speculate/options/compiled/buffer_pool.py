"""Pool KV buffers between calls, so that CUDA graphs find them at the same addresses."""

import threading
from collections import OrderedDict
from collections.abc import Hashable

import torch
from torch import nn

from hf_speculate.cache.pooled_buffers import BufferShape, PooledBuffers
from hf_speculate.model_state import model_state
from hf_speculate.models.module_walk import weight_bytes

# Idle buffers of a model may take a quarter of the size of its weights, which is enough for 32,768
# tokens of a Llama with 8 billion parameters in half precision. The minimum is enough for 8,192
# such tokens.
MIN_POOLED_BYTES = 1 << 30
POOLED_SHARE = 4


class BufferPool:
    """The idle KV buffers of one model, least recently used first."""

    def __init__(self, max_bytes: int = MIN_POOLED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._idle: OrderedDict[Hashable, PooledBuffers] = OrderedDict()

    @classmethod
    def of(cls, model: nn.Module) -> "BufferPool":
        """Return the pool of a model, bounded by the size of its weights."""
        return model_state(model).get(cls, lambda: cls(max_pooled_bytes(model)))

    def take(self, shape: BufferShape, num_layers: int) -> PooledBuffers | None:
        """Take zeroed buffers for all layers; return None if there are none of this shape."""
        with self._lock:
            buffers = self._idle.pop(_key(shape), None)
        if buffers is None or len(buffers.layers) != num_layers:
            return None
        for buffer in buffers.tensors:
            buffer.zero_()  # masked columns must not be NaN
        return buffers

    def give_back(self, shape: BufferShape, buffers: PooledBuffers) -> None:
        """Return buffers to the pool unless rows have left.

        Drop the least recently used buffers past the pool's maximum size.
        """
        if {(tensor.shape[0], tensor.shape[2]) for tensor in buffers.tensors} != {shape[:2]}:
            return
        with self._lock:
            self._idle.setdefault(_key(shape), buffers)
            self._idle.move_to_end(_key(shape))
            while sum(idle.num_bytes for idle in self._idle.values()) > self._max_bytes:
                self._idle.popitem(last=False)


def max_pooled_bytes(model: nn.Module) -> int:
    """Return the limit on a model's idle buffers, in bytes."""
    return max(sum(map(weight_bytes, model.parameters())) // POOLED_SHARE, MIN_POOLED_BYTES)


def _key(shape: BufferShape) -> Hashable:
    return shape, torch.is_inference_mode_enabled()  # other modes cannot write to inference tensors
