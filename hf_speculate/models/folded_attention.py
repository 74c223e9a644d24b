"""SDPA attention that folds the heads of a group into query rows for the duration of a call.

In grouped-query attention, g query heads share one key-value head. transformers' `sdpa` copies keys
and values g times if several query rows come with a mask, as in every verification. Folding turns
the g heads into g times as many query rows of one head, so keys and values are read in place:

    query [B, g*H, Q, D] -> [B, H, g*Q, D],    mask [B, 1, Q, T] -> [B, 1, g*Q, T]

Every row's softmax runs over the same numbers as before, so the result differs by round-off at
most. The mask is folded once per forward. On some devices, this module also chooses the attention
backend, even without folding; see `_BACKENDS`.
"""

import contextvars
import importlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_speculate.cache.masks import shows_spans

STANDS_FOR = "sdpa"  # the function that ours replaces and uses for unsupported inputs

# Device type -> module that chooses its attention backend, imported for a model on such a device.
_BACKENDS = {"cuda": "hf_speculate.options.cuda.attention_backends"}
_loaded: dict[str, Any] = {}  # modules imported in advance, because a trace cannot import

# On other devices, transformers requests grouped heads from SDPA itself or changes the mask.
_DEVICES = ("cpu", "cuda")
# Arguments that affect transformers' function. It ignores all other arguments, and so does ours.
_HONOURED = ("position_bias", "cache", "softcap")
# The folded mask is a copy with g*Q*T entries per row. Up to 64 query tokens, folding was as fast
# or faster; from 256 tokens, it was slower (float32 and bfloat16, 500 to 1000 states, g = 4, 2-core
# CPU).
_MAX_QUERY_TOKENS = 64

_MAX_MASKS = 4  # maximum number of masks kept per forward, one for each layer type
_SPANS = 0  # key for a mask's column spans, used instead of a number of groups

_Masks = deque[tuple[Tensor, int, Tensor]]
"""Masks, each with a number of groups and the converted mask, or with `_SPANS` and the spans."""


class _Forward(NamedTuple):
    """The forward in progress."""

    masks: _Masks
    is_captured: bool


_forward: contextvars.ContextVar[_Forward | None] = contextvars.ContextVar(
    "hf_speculate_forward", default=None
)


@contextmanager
def folding(is_captured: bool = True) -> Iterator[None]:
    """Let `folded_attention` fold in this thread or task during one forward.

    Elsewhere, `folded_attention` calls the "sdpa" function.

    Args:
        is_captured: whether the forward is replayed from graphs or compared with a replay.
    """
    token = _forward.set(_Forward(deque(maxlen=_MAX_MASKS), is_captured))
    try:
        yield
    finally:
        _forward.reset(token)


def folded_attention(
    module: nn.Module,
    query: Tensor,  # [B, g*H, Q, D]
    key: Tensor,  # [B, H, T, D]
    value: Tensor,  # [B, H, T, D']
    # [B or 1, 1, Q, T], bool (True: visible) or floating point (added); None for causal attention
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,  # factor for the scores; None for 1 / sqrt(D)
    # whether a missing mask means causal attention; None for `module.is_causal`
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention like transformers' `sdpa`, but without copying keys and values.

    Heads are folded within `folding()` and in code traced by `torch.compile`, which does not see
    contexts. Unsupported inputs are passed to the function registered as "sdpa". Returns a
    contiguous tensor [B, Q, g*H, D'], and None for the weights.
    """
    passed_on: Any = ALL_ATTENTION_FUNCTIONS[STANDS_FOR]
    forward = None if torch.compiler.is_compiling() else _forward.get()
    is_ours = torch.compiler.is_compiling() or forward is not None
    can_attend = not dropout and not any(kwargs.get(name) is not None for name in _HONOURED)
    if is_ours and can_attend and passed_on is sdpa_attention_forward:
        is_causal_layer = getattr(module, "is_causal", True) if is_causal is None else is_causal
        output = _attend(
            module, query, key, value, attention_mask, scaling, is_causal_layer, forward
        )
        if output is not None:
            return output, None
    result: tuple[Tensor, None] = passed_on(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **kwargs,
    )
    return result


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
    forward: _Forward | None,
) -> Tensor | None:
    """Compute attention as a contiguous tensor [B, Q, g*H, D'].

    The result is None if transformers' own function must compute it.
    """
    groups: Any = getattr(module, "num_key_value_groups", 1)
    backends, num_query = _backends_for(query, value), query.shape[2]
    is_ours = backends is not None
    if not is_ours and (groups <= 1 or query.device.type not in _DEVICES):
        return None
    masks = None if forward is None else forward.masks
    if is_causal:
        prepare(query, key, value)
    if mask is None and num_query > 1:  # a prompt, which is causal without a mask
        if not is_ours or (is_causal and num_query != key.shape[2]):
            return None
        prompt: Tensor = backends.attend_all(query, key, value, is_causal, scaling)
        return prompt.transpose(1, 2).contiguous()
    if mask is not None and not _covers(mask, query, key):
        return None
    if is_ours and forward is not None and mask is not None and shows_spans(mask):
        few = _attend_few(backends, query, key, value, mask, scaling, forward)
        if few is not None:
            return few
    folds = num_query <= _MAX_QUERY_TOKENS and (mask is None or mask.shape[1] == 1)
    if not is_ours and not folds:
        return None
    if not folds:
        key, value, groups = backends.repeated(key, groups), backends.repeated(value, groups), 1
    folded = query.reshape(query.shape[0], -1, groups * num_query, query.shape[3])  # [B, H, g*Q, D]
    if mask is not None:
        make = partial(backends.additive_mask, dtype=query.dtype) if is_ours else _repeat_rows
        num_copies = groups if mask.shape[2] > 1 else 1  # a single mask row applies to all groups
        mask = _converted_once(make, mask, num_copies, masks)  # [B, 1, g*Q, T]
    if not is_ours:
        output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    elif mask is None:
        output = backends.attend_all(folded, key, value, False, scaling)
    else:
        output = backends.attend_masked(folded, key, value, mask, scaling)
    if num_query == 1:
        return output.reshape(output.shape[0], 1, -1, value.shape[3])
    output = output.unflatten(2, (groups, num_query)).permute(0, 3, 1, 2, 4)  # [B, Q, H, g, D']
    joined: Tensor = output.reshape(output.shape[0], num_query, -1, value.shape[3])
    return joined.contiguous()


def _attend_few(
    backends: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    forward: _Forward,
) -> Tensor | None:
    """Compute attention as a contiguous tensor [B, Q, g*H, D] with a kernel for few queries.

    The result is None if no kernel supports the inputs.
    """
    if not backends.serves_few(query, key, value, scaling, forward.is_captured):
        return None
    spans = _converted_once(backends.spans_of, mask, _SPANS, forward.masks)
    output: Tensor = backends.attend_few(query, key, value, spans, scaling)
    return output


def prepare(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Find out, in a prompt's causal forward, how later forwards attend to a few queries.

    Nothing is done outside `folding()`.
    """
    is_traced = torch.compiler.is_compiling()
    if not is_traced and _forward.get() is not None and (backends := _backends_for(query, value)):
        backends.prepare(query, key, value)


def _backends_for(query: Tensor, value: Tensor) -> Any:
    """Return the module that chooses the attention backend for these inputs; None for no module."""
    backends = _loaded.get(query.device.type)
    return backends if backends is not None and backends.chooses_backend(query, value) else None


def _covers(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    return (
        mask.ndim == 4
        and mask.shape[2:] == (query.shape[2], key.shape[2])
        and mask.shape[1] in (1, query.shape[1])
    )


def _converted_once(
    make: Callable[[Tensor, int], Tensor], mask: Tensor, groups: int, masks: _Masks | None
) -> Tensor:
    for original, number, converted in masks or ():
        if original is mask and number == groups:
            return converted
    converted = make(mask, groups)
    if masks is not None:
        masks.append((mask, groups, converted))
    return converted


def _repeat_rows(mask: Tensor, groups: int) -> Tensor:
    return mask if groups == 1 else mask.repeat(1, 1, groups, 1)


def is_chosen(devices: Iterable[torch.device]) -> bool:
    """Return whether this module chooses the attention backend on any of the devices.

    The modules that make the choice are imported.
    """
    served = [device for device in devices if device.type in _BACKENDS]
    for device in served:
        if device.type not in _loaded:
            _loaded[device.type] = importlib.import_module(_BACKENDS[device.type])
    return any(_loaded[device.type].is_chosen([device]) for device in served)
