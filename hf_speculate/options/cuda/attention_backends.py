"""Attention backends on CUDA in half precision: flash attention without a mask, memory-efficient with one.

Few queries under a mask of our caches go to a kernel of our own where it was seen to be right and
faster.

torch may choose cuDNN, which builds a plan for every new set of sizes and strides. The number of
keys grows with every forward, so nearly every forward would build one: tens of milliseconds, when
the forward itself takes a few.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_speculate.options.cuda import split_attention

_DEVICE_TYPE = "cuda"
_DTYPES = (torch.float16, torch.bfloat16)
_UNIT = 8  # entries of 16 bytes: what the kernels load at once
_MAX_FLASH_WIDTH = 256
_OLDEST = (8, 0)  # older devices have neither flash attention nor cuDNN's

# by the index of a CUDA device; filled before anything is traced, which cannot ask
_served: dict[int, bool] = {}


def find_devices() -> None:
    """See which of the CUDA devices have flash attention; again is harmless."""
    if not _served and torch.cuda.is_available() and torch.version.hip is None:
        has_flash = torch.backends.cuda.is_flash_attention_available()
        for index in range(torch.cuda.device_count()):
            _served[index] = has_flash and torch.cuda.get_device_capability(index) >= _OLDEST


def is_chosen(devices: Iterable[torch.device]) -> bool:
    """Whether the backend of attention on any of the devices is left to the functions below."""
    find_devices()
    return any(_is_served(device) for device in devices)


def chooses_backend(query: Tensor, value: Tensor) -> bool:
    """Whether attention of these [B, H, Q, D] and [B, H, T, D'] is left to the functions below."""
    if query.dtype not in _DTYPES or not _is_served(query.device):
        return False
    if query.shape[-1] % _UNIT or value.shape[-1] % _UNIT:
        return False  # nor does cuDNN take these
    if torch.compiler.is_compiling():  # which cannot ask what a user has switched off
        return True
    return bool(
        torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
    )


def attend_all(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scaling: float | None
) -> Tensor:
    """Attention [B, g*H, Q, D'] without a mask of [B, g*H, Q, D] to [B, H, T, D or D'], in memory [B, Q, g*H, D'].

    If `is_causal`, query i sees the keys up to i only, and Q is T.
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
    """Attention [B, H, Q, D'], in memory [B, Q, H, D'], under an `additive_mask` [B or 1, H or 1, Q or 1, T]."""
    shape = (*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    outputs: Sequence[Tensor] = efficient(
        query, key, value, mask.expand(shape), False, 0.0, False, scale=scaling
    )
    return outputs[0]


def prepare(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Find out in a prompt's forward what serves the few queries of later forwards."""
    if query.shape[2] == key.shape[2] and key.shape == value.shape:
        groups = query.shape[1] // key.shape[1]
        convert = partial(additive_mask, groups=groups, dtype=query.dtype)
        split_attention.run_trial(query, key, split_attention.Contender(convert, _attend_folded))


def serves_few(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, is_captured: bool
) -> bool:
    """Whether few queries are left to `attend_few`, which takes the spans of columns that they see."""
    return split_attention.serves(query, key, value, scaling, is_captured)


def spans_of(mask: Tensor, _: int) -> Tensor:
    """The columns [B or 1, Q, 2] int32 that queries see, of a mask that shows spans."""
    return split_attention.key_spans(mask)


def attend_few(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scaling: float | None
) -> Tensor:
    """Attention [B, Q, g*H, D], contiguous, of [B, g*H, Q, D] to [B, H, T, D]."""
    return split_attention.attend(query, key, value, spans, scaling)


def _attend_folded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Attention [B, Q, g*H, D] as forwards compute it without our kernel, with the heads of a group folded."""
    batch_size, num_query_heads, num_query, width = query.shape
    folded = query.reshape(batch_size, key.shape[1], -1, width)  # [B, H, g*Q, D]
    output = attend_masked(folded, key, value, mask, scaling).unflatten(2, (-1, num_query))
    joined: Tensor = output.permute(0, 3, 1, 2, 4).reshape(
        batch_size, num_query, num_query_heads, width
    )
    return joined


def additive_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A mask [B or 1, H or 1, g*Q, T] as memory-efficient attention takes it: added to the scores, of aligned rows.

    The given one is [B or 1, H or 1, Q, T], bool (True: seen) or floating (added); it is returned
    if it is such a mask.
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
    """[B, g*H, T, D]: each head [B, H, T, D] g times."""
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


def _is_served(device: torch.device) -> bool:
    return device.type == _DEVICE_TYPE and _served.get(device.index or 0, False)


def _is_aligned(mask: Tensor) -> bool:
    # rows of compiled forwards are, and where memory begins cannot be traced
    if torch.compiler.is_compiling():
        return True
    return mask.stride(-1) == 1 and all(
        number % _UNIT == 0 for number in (*mask.stride()[:-1], mask.storage_offset())
    )
