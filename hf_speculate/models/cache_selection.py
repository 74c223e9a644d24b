"""Cache selection: hybrid for recurrent layers, preallocated if the model supports it, otherwise dynamic."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.buffer_pool import BufferPool
from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.cache.hybrid import HybridKVCache
from hf_speculate.cache.layers import (
    ATTENTION_LAYERS,
    fixed_layers,
    holding,
    is_recurrent,
    only_attends,
    text_cache,
    window_of,
)
from hf_speculate.cache.preallocated import LayerKinds, PreallocatedKVCache
from hf_speculate.cache.recurrent import RecurrentStates
from hf_speculate.compat import attention_name
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models.folded_attention import FOLDED, STANDS_FOR
from hf_speculate.models.language_model import takes_positions
from hf_speculate.models.mixer_steps import SteppedMixer
from hf_speculate.models.mixers import stepped_model
from hf_speculate.models.quirks import Limit, limit_reason, takes_mask_by_kind
from hf_speculate.models.text_decoder import makes_causal_masks, text_decoder
from hf_speculate.models.wrapper_probe import EVERYTHING, HandedOn

_ATTENTIONS = ("eager", STANDS_FOR, FOLDED)  # the last while another call of the same model runs
_MASK_NAMES = ("full_attention", "sliding_attention")
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size")  # without either, no layer has a window
# Share of the device's memory that the states after each token of a verification may take.
MAX_STATE_SHARE = 0.05
_UNKNOWN_MEMORY_BYTES = 8 << 30


@dataclass(frozen=True)
class CachePlan:
    """The KV cache of one model: what its kind depends on, and the kind once `choose` has found it."""

    requested: str  # "auto", "dynamic" or "preallocated"
    is_cache_passed: bool = False  # whether the user passed the cache; "auto" then makes no second copy of it
    is_cache_kept: bool = False  # whether the cache outlives the call
    records_attentions: bool = False  # whether the call returns attention weights, which have the shape of the states
    crosses: bool = False  # whether layers attend to an encoder's output too
    max_columns: int | None = None  # the longest that a row can become, padding included
    num_recurrent_states: int = 1  # states of one row that a round keeps at most, B * (K + 1)
    handed_on: HandedOn = EVERYTHING  # what reaches the model's text decoder
    kind: str = ""  # "dynamic", "preallocated" or "hybrid"; empty before `choose`
    reason: str = ""  # why "preallocated" was not chosen though it was preferred, or how "hybrid" rolls back

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind

    def choose(
        self,
        model: PreTrainedModel,
        cache: Cache | None,  # its layers tell what each attends to; None for a draft model
        attention_mask: Tensor | None,  # [B, T] int64 over the cache's states and the prompt
        device: torch.device,
    ) -> "CachePlan":
        """The plan with the kind: hybrid for recurrent layers, preallocated if supported, otherwise dynamic."""
        layers = _layers_of(model, cache)
        wants = self.requested == "preallocated" or (self.requested == "auto" and not self.is_cache_passed)
        reason = next(self._obstacles(model, layers, attention_mask, device), "") if wants else ""
        if reason and self.requested == "preallocated":
            raise UnsupportedModelError(
                f"speculation_cache must be auto or dynamic for {type(model).__name__}, got 'preallocated': {reason}; "
                "leave it out"
            )
        if is_recurrent(layers):
            text = rollback_text(model, layers, self.num_recurrent_states, device)
            return replace(self, kind="hybrid", reason=text)
        if wants and not reason:
            return replace(self, kind="preallocated")
        quirk = "" if cache is None else limit_reason(model, Limit.ONLY_PREALLOCATED)
        if quirk and _windows(layers) != {None}:
            raise UnsupportedModelError(
                f"states of {type(model).__name__} must be preallocated, for {quirk}, got "
                f"{reason or 'a dynamic cache'}; leave the cache and speculation_cache out, or decode plainly"
            )
        return replace(self, kind="dynamic", reason=reason)

    def make(
        self,
        model: PreTrainedModel,
        cache: Cache | None,
        batch_size: int,
        attention_mask: Tensor | None,
        device: torch.device,
        capacity: int | None = None,  # columns of preallocated buffers that never grow; None if buffers grow
        pool: BufferPool | None = None,  # where such buffers are between calls of the same shapes
    ) -> KVCache:
        """The KV cache of the kind chosen with the same arguments."""
        if self.kind == "hybrid":
            return make_hybrid_cache(model, cache, batch_size, attention_mask, device)
        if self.kind == "dynamic":
            # A draft's layers are all full ones, so that K forwards in a row can be rolled back at once.
            if cache is None:
                cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if self.crosses else DynamicCache()
            fixed = fixed_layers(model.config.get_text_config(decoder=True))
            return DynamicKVCache(cache, batch_size, attention_mask, device, fixed)
        kept_cache = cache if self.is_cache_kept else None
        windows = tuple(window_of(layer) for layer in holding(_layers_of(model, cache).layers))
        by_name: dict[str, int | None] = {_MASK_NAMES[window is not None]: window for window in windows}
        kinds = LayerKinds(windows, by_name, model.dtype, bool(limit_reason(model, Limit.MASK_PER_ROW)))
        return PreallocatedKVCache(
            kinds, batch_size, attention_mask, device, self.max_columns, kept_cache, capacity, pool
        )

    def _obstacles(
        self, model: PreTrainedModel, cache: Cache, attention_mask: Tensor | None, device: torch.device
    ) -> Iterator[str]:
        """Why the states cannot be preallocated; nothing where they can."""
        if is_recurrent(cache):
            yield "it has recurrent layers"
        if quirk := limit_reason(model, Limit.ONLY_DYNAMIC):
            yield quirk
        config, decoder = model.config.get_text_config(decoder=True), text_decoder(model)
        if (attention := attention_name(config)) not in _ATTENTIONS:
            yield f"its attention is {attention}"
        if self.crosses:
            yield "its layers attend to an encoder's output"
        if not takes_positions(model):
            yield "it takes no position_ids"
        if not makes_causal_masks(decoder):
            yield f"its {type(decoder).__name__} makes masks in a way of its own"
        yield from self._obstacles_of_wrapper(model)
        if getattr(config, "alibi", False):
            yield "its positions are biases of the attention"
        names, windows = set(getattr(config, "layer_types", None) or _MASK_NAMES[:1]), _windows(cache)
        if not names <= set(_MASK_NAMES):
            yield "its layers attend in other ways than fully or by window"
        if "local" in (getattr(config, "attention_layers", None) or ()):
            yield "its layers cut their windows by columns"
        if len(windows) > len(names):
            yield "its layers have several windows"
        if len(windows) > 1 and not takes_mask_by_kind(decoder):
            yield "it takes one mask for layers of two kinds"
        if not cache.layers or any(type(layer) not in ATTENTION_LAYERS for layer in holding(cache.layers)):
            yield "its cache has layers of another kind"
        if windows != _windows_by(config):
            yield "its cache was made without its config, and knows no windows"
        if cache.offloading:
            yield "its cache is offloaded"
        if self.records_attentions:
            yield "attention weights are returned"
        if torch.is_autocast_enabled(device.type):
            yield "autocast picks the dtypes"
        if has_holes(attention_mask):
            yield "the attention mask has holes"

    def _obstacles_of_wrapper(self, model: PreTrainedModel) -> Iterator[str]:
        """Why a forward around the text decoder cannot be given masks and positions."""
        name = type(model).__name__
        if self.handed_on.failure:
            yield f"a probe of {name} failed ({self.handed_on.failure})"
        if not self.handed_on.mask:
            yield f"{name} hands another mask on to its text decoder"
        if not self.handed_on.positions:
            yield f"{name} hands other positions on to its text decoder"


def _layers_of(model: PreTrainedModel, cache: Cache | None) -> Cache:
    return DynamicCache(config=model.config.get_text_config(decoder=True)) if cache is None else text_cache(cache)


def _windows(cache: Cache) -> set[int | None]:
    return {window_of(layer) for layer in holding(cache.layers)}


def _windows_by(config: PreTrainedConfig) -> set[int | None]:
    """Windows of the layers that a config describes."""
    is_uniform = only_attends(config) and not getattr(config, "is_heterogeneous", False)
    if is_uniform and all(getattr(config, name, None) is None for name in _WINDOW_NAMES):
        return {None}
    return _windows(DynamicCache(config=config))


def has_holes(attention_mask: Tensor | None) -> bool:
    """Whether a row has masked tokens after its first real one, or no real one."""
    if attention_mask is None:
        return False
    return bool((attention_mask[:, 1:] < attention_mask[:, :-1]).any() or not attention_mask[:, -1].all())


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
    attach = [SteppedMixer(mixer, protocol, states).attach for mixer, protocol in found.mixers]
    return HybridKVCache(cache, states, attach, batch_size, attention_mask, device)


def rollback_text(model: PreTrainedModel, cache: Cache, num_states: int, device: torch.device) -> str:
    """How a hybrid cache rolls recurrent states back, in words; a round keeps `num_states` of a row at most."""
    num_bytes = stepped_model(model, cache).num_bytes * num_states
    if num_bytes <= _max_kept_bytes(device):
        return f"keeps {num_bytes / 2**20:.3g} MiB of states after each token"
    return (
        f"computes states again from recorded projections, because {num_bytes / 2**20:.3g} MiB exceed "
        f"{MAX_STATE_SHARE:.0%} of the memory"
    )


def memory_bytes(device: torch.device) -> int:
    """The memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not POSIX
        return _UNKNOWN_MEMORY_BYTES


def _max_kept_bytes(device: torch.device) -> int:
    """What the states after each token of a verification may take of a device's memory."""
    return int(MAX_STATE_SHARE * memory_bytes(device))


def _with_full_attention(cache: Cache) -> Cache:
    """The cache without windows, so that several forwards in a row can be rolled back at once."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = DynamicLayer()
        elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            cache.layers[index] = LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return cache
