"""Makes the hybrid KV cache of a model with recurrent layers, and its hooks on the model's mixers."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from hf_speculate.cache.hybrid import HybridKVCache
from hf_speculate.cache.recurrent import RecurrentStates
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models.mixer_steps import SteppedMixer
from hf_speculate.models.mixers import stepped_model

# Share of the device's memory that the states after each token of a verification may take.
MAX_STATE_SHARE = 0.05
_UNKNOWN_MEMORY_BYTES = 8 << 30


class MixerHooks:
    """`TokenReader` of a model's mixers; hooks of other calls on the same model are independent."""

    def __init__(self, mixers: Sequence[SteppedMixer]):
        self._mixers = mixers
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        if self._handles:
            return
        for mixer in self._mixers:
            mixer.attach(self._handles)

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def make_hybrid_cache(
    model: PreTrainedModel,
    cache: Cache | None,
    batch_size: int,
    attention_mask: Tensor | None,
    device: torch.device,
    max_kept_bytes: int | None = None,
) -> HybridKVCache:
    """The hybrid KV cache of a model with recurrent layers, over what transformers made or the user passed."""
    config = model.config.get_text_config(decoder=True)
    if cache is None:
        cache = _with_full_attention(DynamicCache(config=config))
    found = stepped_model(model, cache)
    if found.obstacle:
        raise UnsupportedModelError(
            f"models must be able to roll back, got {type(model).__name__} with recurrent state, {found.obstacle}; "
            "decode plainly"
        )
    states = RecurrentStates(cache, _max_kept_bytes(device) if max_kept_bytes is None else max_kept_bytes)
    hooks = MixerHooks([SteppedMixer(mixer, protocol, states) for mixer, protocol in found.mixers])
    return HybridKVCache(cache, states, hooks, batch_size, attention_mask, device)


def rollback_text(model: PreTrainedModel, cache: Cache, num_states: int, device: torch.device) -> str:
    """How a hybrid cache rolls recurrent states back, in words; a round keeps `num_states` of a row at most."""
    num_bytes = stepped_model(model, cache).num_bytes * num_states
    if num_bytes <= _max_kept_bytes(device):
        return f"keeps {num_bytes / 2**20:.3g} MiB of states after each token"
    return (
        f"computes states again from recorded projections, because {num_bytes / 2**20:.3g} MiB exceed "
        f"{MAX_STATE_SHARE:.0%} of the memory"
    )


def _max_kept_bytes(device: torch.device) -> int:
    return int(MAX_STATE_SHARE * memory_bytes(device))


def memory_bytes(device: torch.device) -> int:
    """Total memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not POSIX
        return _UNKNOWN_MEMORY_BYTES


def _with_full_attention(cache: Cache) -> Cache:
    """The cache without windows, so that several forwards in a row can be rolled back at once."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = DynamicLayer()
        elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            cache.layers[index] = LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return cache
