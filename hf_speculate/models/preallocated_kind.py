"""The preallocated kind: buffers in which each row writes at its own end, for models that take masks and positions."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.layers import ATTENTION_LAYERS, holding, is_recurrent, only_attends, window_of
from hf_speculate.cache.preallocated import MaskSpec, PreallocatedKVCache
from hf_speculate.compat import attention_name
from hf_speculate.models.cache_kinds import GROWING, Buffers, CacheKind, CacheRequest, windows_in
from hf_speculate.models.folded_attention import FOLDED, STANDS_FOR
from hf_speculate.models.language_model import dtype_of, takes_positions
from hf_speculate.models.quirks import Limit, limit_reason, takes_mask_by_type
from hf_speculate.models.text_decoder import makes_causal_masks, text_decoder
from hf_speculate.models.wrapper_probe import HandedOn

_ATTENTIONS = ("eager", STANDS_FOR, FOLDED)  # the last while another call of the same model runs
_MASK_NAMES = ("full_attention", "sliding_attention")
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size")  # without either, no layer has a window


class PreallocatedKind(CacheKind):
    """States in buffers that are written at each row's own end."""

    def obstacle(self, request: CacheRequest) -> str:
        return next(_obstacles(request), "")

    def make(self, request: CacheRequest, batch_size: int, buffers: Buffers = GROWING) -> KVCache:
        kept_cache = request.cache if request.is_kept else None
        windows = tuple(window_of(layer) for layer in holding(request.layers.layers))
        by_name: dict[str, int | None] = {_MASK_NAMES[window is not None]: window for window in windows}
        is_mask_per_row = bool(limit_reason(request.model, Limit.MASK_PER_ROW))
        mask_spec = MaskSpec(windows, by_name, dtype_of(request.model), is_mask_per_row)
        shape = batch_size, request.attention_mask, request.device, request.max_columns
        return PreallocatedKVCache(mask_spec, *shape, kept_cache, *buffers)


KIND = PreallocatedKind()


def _obstacles(request: CacheRequest) -> Iterator[str]:
    """Why the states cannot be preallocated; nothing where they can."""
    model, cache = request.model, request.layers
    if is_recurrent(cache):
        yield "it has recurrent layers"
    if quirk := limit_reason(model, Limit.ONLY_DYNAMIC):
        yield quirk
    config, decoder = model.config.get_text_config(decoder=True), text_decoder(model)
    if (attention := attention_name(config)) not in _ATTENTIONS:
        yield f"its attention is {attention}"
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
    if not cache.layers or any(type(layer) not in ATTENTION_LAYERS for layer in holding(cache.layers)):
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
    """Why a forward around the text decoder cannot be given masks and positions."""
    name = type(model).__name__
    if handed_on.failure:
        yield f"a probe of {name} failed ({handed_on.failure})"
    if not handed_on.mask:
        yield f"{name} hands another mask on to its text decoder"
    if not handed_on.positions:
        yield f"{name} hands other positions on to its text decoder"


def _windows_by(config: PreTrainedConfig) -> set[int | None]:
    """Windows of the layers that a config describes."""
    is_uniform = only_attends(config) and not getattr(config, "is_heterogeneous", False)
    if is_uniform and all(getattr(config, name, None) is None for name in _WINDOW_NAMES):
        return {None}
    return windows_in(DynamicCache(config=config))


def has_holes(attention_mask: Tensor | None) -> bool:
    """Whether a row has masked tokens after its first real one, or no real one."""
    if attention_mask is None:
        return False
    return bool((attention_mask[:, 1:] < attention_mask[:, :-1]).any() or not attention_mask[:, -1].all())
