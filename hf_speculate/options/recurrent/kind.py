"""The hybrid cache kind: transformers' dynamic cache, and recurrent states recorded by hooks."""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from hf_speculate.cache.base import KVCache
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models.cache_kinds import GROWING, Buffers, CacheKind, CacheRequest
from hf_speculate.models.memory import memory_bytes
from hf_speculate.options.recurrent.hybrid_cache import HybridKVCache
from hf_speculate.options.recurrent.mixer_steps import SteppedMixer
from hf_speculate.options.recurrent.mixers import stepped_model
from hf_speculate.options.recurrent.states import RecurrentStates

# Largest share of the device's memory for the recurrent states of a verification.
MAX_STATE_SHARE = 0.05


class HybridKind(CacheKind):
    """The cache kind for models with recurrent layers."""

    def obstacle(self, request: CacheRequest) -> str:
        return stepped_model(request.model, request.layers).obstacle

    def remark(self, request: CacheRequest) -> str:
        return rollback_text(
            request.model, request.layers, request.num_recurrent_states, request.device
        )

    def make(self, request: CacheRequest, batch_size: int, buffers: Buffers = GROWING) -> KVCache:
        return make_hybrid_cache(
            request.model, request.cache, batch_size, request.attention_mask, request.device
        )


KIND = HybridKind()


def make_hybrid_cache(
    model: PreTrainedModel,
    cache: Cache | None,
    batch_size: int,
    attention_mask: Tensor | None,
    device: torch.device,
    max_kept_bytes: int | None = None,
) -> HybridKVCache:
    """Make the hybrid KV cache of a model with recurrent layers.

    A passed `cache` is wrapped. Without `cache`, make the cache of a draft model.

    Raises:
        UnsupportedModelError: the model's recurrent states cannot be rolled back.
    """
    config, is_drafts = model.config.get_text_config(decoder=True), cache is None
    if cache is None:
        cache = _with_full_attention(DynamicCache(config=config))
    stepped = stepped_model(model, cache)
    if stepped.obstacle:
        raise UnsupportedModelError(
            f"speculative decoding rolls back rejected tokens, but {type(model).__name__} has "
            "recurrent state "
            f"{stepped.obstacle}; decode plainly"
        )
    states = RecurrentStates(
        cache, _max_kept_bytes(device) if max_kept_bytes is None else max_kept_bytes
    )
    attach = [SteppedMixer(mixer, protocol, states).attach for mixer, protocol in stepped.mixers]
    # A target must drop earlier states as in plain decoding; a draft model would only draft poorly.
    steps = is_drafts and not stepped.reads_at_once
    return HybridKVCache(cache, states, attach, batch_size, attention_mask, device, steps)


def rollback_text(
    model: PreTrainedModel, cache: Cache, num_states: int, device: torch.device
) -> str:
    """Describe the rollback of recurrent states with up to `num_states` per row and round."""
    num_bytes = stepped_model(model, cache).num_bytes * num_states
    if num_bytes <= _max_kept_bytes(device):
        return f"keeps {num_bytes / 2**20:.3g} MiB of states after each token"
    return (
        f"computes states again from recorded projections, because {num_bytes / 2**20:.3g} MiB "
        "exceed "
        f"{MAX_STATE_SHARE:.0%} of the memory"
    )


def _max_kept_bytes(device: torch.device) -> int:
    """Return the memory limit, in bytes, for states after each token of a verification."""
    return int(MAX_STATE_SHARE * memory_bytes(device))


def _with_full_attention(cache: Cache) -> Cache:
    """Replace window layers with full layers, to roll back several forwards at once."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = DynamicLayer()
        elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            cache.layers[index] = LinearAttentionAndFullAttentionLayer(
                number_of_states=layer.number_of_states
            )
    return cache
