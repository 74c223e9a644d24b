"""Cache kinds: choose the kind of a model's KV cache and make the cache."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.cache.layers import (
    ATTENTION_LAYERS,
    fixed_layers,
    holding,
    is_recurrent,
    only_attends,
    text_cache,
    window_of,
)
from hf_speculate.cache.pooled_buffers import Pool
from hf_speculate.cache.preallocated import MaskSpec, PreallocatedKVCache
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models.attention_names import mask_obstacle
from hf_speculate.models.language_model import dtype_of, takes_positions
from hf_speculate.models.quirks import Limit, limit_reason, takes_mask_by_type
from hf_speculate.models.text_decoder import makes_causal_masks, text_decoder
from hf_speculate.models.wrapper_probe import EVERYTHING, HandedOn

_HYBRID = "hf_speculate.options.recurrent.kind"  # imported if a call may need a hybrid cache
_MASK_NAMES = ("full_attention", "sliding_attention")
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size")  # without either, no layer has a window


@dataclass(frozen=True)
class CacheRequest:
    """Request for a model's KV cache."""

    model: PreTrainedModel
    cache: Cache | None  # the states at the start of the call; None for a draft model
    attention_mask: Tensor | None  # [B, T] int64 over cached states and prompt, on the device
    device: torch.device
    requested: str = "auto"  # "auto", "dynamic" or "preallocated"
    # whether the user passed the cache, in which case "auto" makes no second copy
    is_passed: bool = False
    is_kept: bool = False  # whether the cache outlives the call
    records_attentions: bool = False  # whether the call returns attention weights
    crosses: bool = False  # whether layers also attend to an encoder's output
    max_columns: int | None = None  # maximum number of columns per row, including padding
    num_recurrent_states: int = 1  # maximum number of recurrent states in a round, B * (K + 1)
    handed_on: HandedOn = EVERYTHING  # arguments that the model passes on to its text decoder

    @cached_property
    def layers(self) -> Cache:
        """The text decoder's cache, without cross-attention; an empty cache if none was given."""
        if self.cache is None:
            return DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return text_cache(self.cache)


class Buffers(NamedTuple):
    """Arguments for preallocated buffers."""

    capacity: int | None = None  # number of columns of fixed buffers; None if buffers grow
    pool: Pool | None = None  # pool that keeps fixed buffers between calls; None for no pool


GROWING = Buffers()


class CacheKind:
    """A kind of KV cache."""

    def obstacle(self, request: CacheRequest) -> str:
        """Return why the model cannot use this kind; empty if it can."""
        return ""

    def remark(self, request: CacheRequest) -> str:
        """Return a note about the cache for the user; empty if there is none."""
        return ""

    def make(self, request: CacheRequest, batch_size: int, buffers: Buffers = GROWING) -> KVCache:
        """Make the KV cache for B rows."""
        raise NotImplementedError


class PreallocatedKind(CacheKind):
    """Preallocated buffers that are written at each row's end."""

    def obstacle(self, request: CacheRequest) -> str:
        return next(_obstacles(request), "")

    def make(self, request: CacheRequest, batch_size: int, buffers: Buffers = GROWING) -> KVCache:
        kept_cache = request.cache if request.is_kept else None
        windows = tuple(window_of(layer) for layer in holding(request.layers.layers))
        by_name: dict[str, int | None] = {
            _MASK_NAMES[window is not None]: window for window in windows
        }
        is_mask_per_row = bool(limit_reason(request.model, Limit.MASK_PER_ROW))
        mask_spec = MaskSpec(windows, by_name, dtype_of(request.model), is_mask_per_row)
        return PreallocatedKVCache(
            mask_spec,
            batch_size,
            attention_mask=request.attention_mask,
            device=request.device,
            max_columns=request.max_columns,
            kept_cache=kept_cache,
            capacity=buffers.capacity,
            pool=buffers.pool,
        )


class DynamicKind(CacheKind):
    """transformers' dynamic cache."""

    def obstacle(self, request: CacheRequest) -> str:
        quirk = (
            "" if request.cache is None else limit_reason(request.model, Limit.ONLY_PREALLOCATED)
        )
        return quirk if quirk and windows_in(request.layers) != {None} else ""

    def make(self, request: CacheRequest, batch_size: int, buffers: Buffers = GROWING) -> KVCache:
        cache = request.cache
        if cache is None:
            # Without a config, all layers of a draft cache have full attention, so K forwards roll
            # back at once.
            cache = (
                EncoderDecoderCache(DynamicCache(), DynamicCache())
                if request.crosses
                else DynamicCache()
            )
        fixed = fixed_layers(request.model.config.get_text_config(decoder=True))
        return DynamicKVCache(cache, batch_size, request.attention_mask, request.device, fixed)


_KINDS = {"preallocated": PreallocatedKind(), "dynamic": DynamicKind()}


def find_kind(name: str) -> CacheKind:
    """Return the cache kind named "preallocated", "dynamic" or "hybrid"."""
    if name in _KINDS:
        return _KINDS[name]
    kind: CacheKind = importlib.import_module(_HYBRID).KIND
    return kind


def choose_kind(request: CacheRequest) -> tuple[str, str]:
    """Choose the cache kind: hybrid if recurrent, preallocated if supported, otherwise dynamic.

    Returns:
        The name of the kind and a note. The note says why "preallocated" was preferred but not
        chosen, or how "hybrid" rolls back.

    Raises:
        UnsupportedModelError: The requested kind is not supported, or no kind is supported.
    """
    wants = request.requested == "preallocated" or (
        request.requested == "auto" and not request.is_passed
    )
    reason, name = (
        find_kind("preallocated").obstacle(request) if wants else "",
        type(request.model).__name__,
    )
    if reason and request.requested == "preallocated":
        raise UnsupportedModelError(
            f"speculation_cache must be auto or dynamic for {name}, got 'preallocated': {reason}; "
            "leave it out"
        )
    if is_recurrent(request.layers):
        return "hybrid", find_kind("hybrid").remark(request)
    if wants and not reason:
        return "preallocated", ""
    if obstacle := find_kind("dynamic").obstacle(request):
        raise UnsupportedModelError(
            f"states of {name} must be preallocated, for {obstacle}, got "
            f"{reason or 'a dynamic cache'}; leave the "
            "cache and speculation_cache out, or decode plainly"
        )
    return "dynamic", reason


def _obstacles(request: CacheRequest) -> Iterator[str]:
    """Yield the reasons against preallocated buffers."""
    model, cache = request.model, request.layers
    if is_recurrent(cache):
        yield "it has recurrent layers"
    if quirk := limit_reason(model, Limit.ONLY_DYNAMIC):
        yield quirk
    config, decoder = model.config.get_text_config(decoder=True), text_decoder(model)
    if obstacle := mask_obstacle(model):
        yield obstacle
    if request.crosses:
        yield "its layers attend to an encoder's output"
    if not takes_positions(model):
        yield "it takes no position_ids"
    if not makes_causal_masks(decoder):
        yield f"its {type(decoder).__name__} makes masks in a way of its own"
    yield from _obstacles_of_wrapper(model, request.handed_on)
    if getattr(config, "alibi", False):
        yield "ALiBi position biases need the dynamic cache"
    names, windows = set(getattr(config, "layer_types", None) or _MASK_NAMES[:1]), windows_in(cache)
    if not names <= set(_MASK_NAMES):
        yield "its layers attend in other ways than fully or by window"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        yield "its layers cut their windows by columns"
    if len(windows) > len(names):
        yield "its layers have several windows"
    if len(windows) > 1 and not takes_mask_by_type(decoder):
        yield "it takes one mask for layers of two types"
    if not cache.layers or any(
        type(layer) not in ATTENTION_LAYERS for layer in holding(cache.layers)
    ):
        yield "its cache has layers of another type"
    if windows != _windows_by(config):
        yield "its cache was made without its config, and knows no windows"
    if cache.offloading:
        yield "its cache is offloaded"
    if request.records_attentions:
        yield "attention weights are returned"
    if torch.is_autocast_enabled(request.device.type):
        yield "autocast picks the dtypes"
    if has_holes(request.attention_mask):
        yield "the attention mask has holes"


def _obstacles_of_wrapper(model: PreTrainedModel, handed_on: HandedOn) -> Iterator[str]:
    """Yield the reasons why the wrapper cannot pass masks and positions to its text decoder."""
    name = type(model).__name__
    if handed_on.failure:
        yield f"a probe of {name} failed ({handed_on.failure})"
    if not handed_on.mask:
        yield f"{name} hands another mask on to its text decoder"
    if not handed_on.positions:
        yield f"{name} hands other positions on to its text decoder"


def _windows_by(config: PreTrainedConfig) -> set[int | None]:
    """Return the attention windows of a config's layers; None stands for full attention."""
    is_uniform = only_attends(config) and not getattr(config, "is_heterogeneous", False)
    if is_uniform and all(getattr(config, name, None) is None for name in _WINDOW_NAMES):
        return {None}
    return windows_in(DynamicCache(config=config))


def has_holes(attention_mask: Tensor | None) -> bool:
    """Return whether a row has masked tokens after its first real token, or no real token."""
    if attention_mask is None:
        return False
    return bool(
        (attention_mask[:, 1:] < attention_mask[:, :-1]).any() or not attention_mask[:, -1].all()
    )


def windows_in(cache: Cache) -> set[int | None]:
    """Return the attention windows of a cache's layers; None stands for full attention."""
    return {window_of(layer) for layer in holding(cache.layers)}
