"""Cache kinds: the kinds of KV caches that a model may have, and the choice among them."""

import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.layers import holding, is_recurrent, text_cache, window_of
from hf_speculate.cache.pooled_buffers import Pool
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models.wrapper_probe import EVERYTHING, HandedOn

# Name -> the module that defines it as `KIND`, imported when a call may have such a cache.
_KINDS = {
    "preallocated": "hf_speculate.models.preallocated_kind",
    "dynamic": "hf_speculate.models.dynamic_kind",
    "hybrid": "hf_speculate.options.recurrent.kind",
}


@dataclass(frozen=True)
class CacheRequest:
    """What the KV cache of a model depends on: the states that it begins a call with, and what is asked of them."""

    model: PreTrainedModel
    cache: Cache | None  # its layers tell what each attends to; None for a draft model
    attention_mask: Tensor | None  # [B, T] int64 over the cache's states and the prompt, on the device
    device: torch.device
    requested: str = "auto"  # or "dynamic", or "preallocated"
    is_passed: bool = False  # whether the user passed the cache; "auto" then makes no second copy of it
    is_kept: bool = False  # whether the cache outlives the call
    records_attentions: bool = False  # whether the call returns attention weights, which have the shape of the states
    crosses: bool = False  # whether layers attend to an encoder's output too
    max_columns: int | None = None  # the longest that a row can become, padding included
    num_recurrent_states: int = 1  # states of one row that a round keeps at most, B * (K + 1)
    handed_on: HandedOn = EVERYTHING  # what reaches the model's text decoder

    @cached_property
    def layers(self) -> Cache:
        """The cache of the text's own states, or an empty one of the model."""
        if self.cache is None:
            return DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return text_cache(self.cache)


class Buffers(NamedTuple):
    """Arguments of preallocated buffers."""

    capacity: int | None = None  # columns of buffers that never grow; None if buffers grow
    pool: Pool | None = None  # where such buffers are between calls of the same shapes


GROWING = Buffers()


class CacheKind:
    """A kind of KV cache: whether a model's states can be of it, and how such a cache is made."""

    def obstacle(self, request: CacheRequest) -> str:
        """Why the states of the model cannot be of this kind; empty if they can."""
        return ""

    def remark(self, request: CacheRequest) -> str:
        """A note about the cache for the user; empty if there is none."""
        return ""

    def make(self, request: CacheRequest, batch_size: int, buffers: Buffers = GROWING) -> KVCache:
        """The KV cache of B rows."""
        raise NotImplementedError


def find_kind(name: str) -> CacheKind:
    """The kind of a name in the table."""
    kind: CacheKind = importlib.import_module(_KINDS[name]).KIND
    return kind


def choose_kind(request: CacheRequest) -> tuple[str, str]:
    """Choose the kind of a model's cache: hybrid for recurrent layers, preallocated if supported, otherwise dynamic.

    Returns:
        The name of the kind, and why "preallocated" was not chosen though it was preferred, or how "hybrid" rolls back.
    """
    wants = request.requested == "preallocated" or (request.requested == "auto" and not request.is_passed)
    reason, name = find_kind("preallocated").obstacle(request) if wants else "", type(request.model).__name__
    if reason and request.requested == "preallocated":
        raise UnsupportedModelError(
            f"speculation_cache must be auto or dynamic for {name}, got 'preallocated': {reason}; leave it out"
        )
    if is_recurrent(request.layers):
        return "hybrid", find_kind("hybrid").remark(request)
    if wants and not reason:
        return "preallocated", ""
    if obstacle := find_kind("dynamic").obstacle(request):
        raise UnsupportedModelError(
            f"states of {name} must be preallocated, for {obstacle}, got {reason or 'a dynamic cache'}; leave the "
            "cache and speculation_cache out, or decode plainly"
        )
    return "dynamic", reason


def windows_in(cache: Cache) -> set[int | None]:
    """The windows of the layers of a cache."""
    return {window_of(layer) for layer in holding(cache.layers)}
