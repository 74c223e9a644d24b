"""Attention backends on CUDA in half precision.

Flash attention runs without a mask, memory-efficient attention with a mask. A few queries under a
mask of our caches use our own kernel if a trial found it correct and faster.

torch may choose cuDNN, which builds a plan for every new set of sizes and strides. The number of
keys grows with every forward, so nearly every forward would build a plan. This takes tens of
milliseconds, while the forward itself takes a few.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_speculate.options.cuda import split_attention

_DEVICE_TYPE = "cuda"
_DTYPES = (torch.float16, torch.bfloat16)
_UNIT = 8  # entries of 16 bytes, the unit of the kernels' loads
_MAX_FLASH_WIDTH = 256
_OLDEST = (8, 0)  # older devices have neither flash attention nor cuDNN attention

# Keyed by CUDA device index. Filled before tracing, since traced code cannot query devices.
_served: dict[int, bool] = {}


def find_devices() -> None:
    """Find the CUDA devices that have flash attention; later calls have no effect."""
    if not _served and torch.cuda.is_available() and torch.version.hip is None:
        has_flash = torch.backends.cuda.is_flash_attention_available()
        for index in range(torch.cuda.device_count()):
            _served[index] = has_flash and torch.cuda.get_device_capability(index) >= _OLDEST


def is_chosen(devices: Iterable[torch.device]) -> bool:
    """Return whether the functions below choose the attention backend on any of the devices."""
    find_devices()
    return any(_is_served(device) for device in devices)


def chooses_backend(query: Tensor, value: Tensor) -> bool:
    """Return whether attention from [B, H, Q, D] to [B, H, T, D'] uses the functions below."""
    if query.dtype not in _DTYPES or not _is_served(query.device):
        return False
    if query.shape[-1] % _UNIT or value.shape[-1] % _UNIT:
        return False  # cuDNN does not take these either
    if torch.compiler.is_compiling():  # a trace cannot read the user's switches
        return True
    return bool(
        torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
    )


def attend_all(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scaling: float | None
) -> Tensor:
    """Compute attention without a mask.

    Args:
        query: [B, g*H, Q, D].
        key: [B, H, T, D].
        value: [B, H, T, D'].
        is_causal: whether query i sees only the keys up to i; in that case, Q = T.
        scaling: factor for the scores; None for 1 / sqrt(D).

    Returns:
        [B, g*H, Q, D'], with the memory layout [B, Q, g*H, D'].
    """
    outputs: Sequence[Tensor]
    if query.shape[-1] == value.shape[-1] <= _MAX_FLASH_WIDTH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        outputs = flash(query, key, value, 0.0, is_causal, False, scale=scaling)
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = repeated(key, groups), repeated(value, groups)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        outputs = efficient(query, key, value, None, False, 0.0, is_causal, scale=scaling)
    return outputs[0]


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Compute attention [B, H, Q, D'] under an additive mask [B or 1, H or 1, Q or 1, T].

    The output's memory layout is [B, Q, H, D'].
    """
    shape = (*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    outputs: Sequence[Tensor] = efficient(
        query, key, value, mask.expand(shape), False, 0.0, False, scale=scaling
    )
    return outputs[0]


def prepare(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Find out, in a prompt's forward, how later forwards compute attention for a few queries."""
    if query.shape[2] == key.shape[2] and key.shape == value.shape:
        groups = query.shape[1] // key.shape[1]
        convert = partial(additive_mask, groups=groups, dtype=query.dtype)
        split_attention.run_trial(query, key, split_attention.Contender(convert, _attend_folded))


def serves_few(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, is_captured: bool
) -> bool:
    """Return whether `attend_few` computes attention for a few queries, from spans of columns."""
    return split_attention.serves(query, key, value, scaling, is_captured)


def spans_of(mask: Tensor, _: int) -> Tensor:
    """Return the columns [B or 1, Q, 2] int32 seen by queries under a mask of spans."""
    return split_attention.key_spans(mask)


def attend_few(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scaling: float | None
) -> Tensor:
    """Compute attention [B, Q, g*H, D], contiguous, from [B, g*H, Q, D] to [B, H, T, D]."""
    return split_attention.attend(query, key, value, spans, scaling)


def _attend_folded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Compute attention [B, Q, g*H, D] with torch's backends instead of our kernel.

    The heads of a group are folded into the query axis.
    """
    batch_size, num_query_heads, num_query, width = query.shape
    folded = query.reshape(batch_size, key.shape[1], -1, width)  # [B, H, g*Q, D]
    output = attend_masked(folded, key, value, mask, scaling).unflatten(2, (-1, num_query))
    joined: Tensor = output.permute(0, 3, 1, 2, 4).reshape(
        batch_size, num_query, num_query_heads, width
    )
    return joined


def additive_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Convert a mask for memory-efficient attention to an additive mask with aligned rows.

    Args:
        mask: [B or 1, H or 1, Q, T], bool (True: seen) or floating (added).
        groups: g, query heads per KV head.
        dtype: dtype of the result.

    Returns:
        [B or 1, H or 1, g*Q, T]. This is the given mask if it needs no conversion.
    """
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
            mask.logical_not(), -torch.inf
        )
    if groups == 1 and mask.dtype == dtype and _is_aligned(mask):
        return mask
    *shape, num_query, num_keys = mask.shape
    width = -(-num_keys // _UNIT) * _UNIT
    rows = mask.new_empty(*shape, groups, num_query, width, dtype=dtype)
    rows[..., :num_keys] = mask[:, :, None]
    return rows.view(*shape, groups * num_query, width)[..., :num_keys]


def repeated(states: Tensor, groups: int) -> Tensor:
    """Repeat each head of [B, H, T, D] g times, to [B, g*H, T, D]."""
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


def _is_served(device: torch.device) -> bool:
    return device.type == _DEVICE_TYPE and _served.get(device.index or 0, False)


def _is_aligned(mask: Tensor) -> bool:
    # Rows of compiled forwards are aligned, and a memory address cannot be traced.
    if torch.compiler.is_compiling():
        return True
    return mask.stride(-1) == 1 and all(
        number % _UNIT == 0 for number in (*mask.stride()[:-1], mask.storage_offset())
    )
