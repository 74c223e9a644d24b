"""Keeps fixed buffers alive between calls, so that CUDA graphs find them at the addresses they were recorded with."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Of one model's buffers between calls: 8192 tokens of a Llama of 8 billion parameters in half precision.
MAX_POOLED_BYTES = 1 << 30


class LayerBuffers(NamedTuple):
    """One layer's."""

    keys: Tensor  # [B, H, capacity, D]
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """Of both."""
        return sum(part.untyped_storage().nbytes() for part in self)


_lock = threading.Lock()
# By model, the buffers that no call uses, the one that was used last at the end; they go with the model.
_idle: "WeakKeyDictionary[PreTrainedModel, OrderedDict[Hashable, list[LayerBuffers]]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class BufferPool:
    """A model's idle buffers of one shape. Buffers that a call has taken are in no pool until it gives them back.

    Args:
        model: whose states they hold.
        batch_size: B.
        capacity: columns of each.
    """

    model: PreTrainedModel
    batch_size: int
    capacity: int

    def take(self, num_layers: int) -> list[LayerBuffers] | None:
        """Buffers of all layers, filled with zeros; None where there are none, and the caller makes its own."""
        with _lock:
            found = _idle.get(self.model, OrderedDict()).pop(self._key, None)
        if found is None or len(found) != num_layers:
            return None
        for buffer in (part for layer in found for part in layer):
            buffer.zero_()  # what a mask hides must be no NaN
        return found

    def give_back(self, layers: list[LayerBuffers]) -> None:
        """Keep buffers for a later call, in place of the longest unused; what is too large is let go."""
        shapes = {(part.shape[0], part.shape[2]) for layer in layers for part in layer}
        if shapes != {(self.batch_size, self.capacity)}:
            return  # rows have left
        with _lock:
            idle = _idle.setdefault(self.model, OrderedDict())
            idle.setdefault(self._key, layers)
            idle.move_to_end(self._key)
            while sum(layer.num_bytes for kept in idle.values() for layer in kept) > MAX_POOLED_BYTES:
                idle.popitem(last=False)

    @property
    def _key(self) -> Hashable:
        """What buffers must have in common to stand for one another; inference tensors cannot be written outside."""
        model = self.model
        return self.batch_size, self.capacity, model.dtype, model.device, torch.is_inference_mode_enabled()
