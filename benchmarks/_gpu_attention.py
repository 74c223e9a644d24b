"""Attention on CUDA: the backend is chosen by us, and close to torch's math backend."""

import itertools
from contextlib import nullcontext
from typing import NamedTuple

import torch
from _gpu_device import Device
from _gpu_report import Report
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_speculate.models.folded_attention import folded_attention, folding, is_chosen, register_folded_attention
from hf_speculate.options.cuda.attention_backends import chooses_backend

TOLERANCE = 2e-2  # of outputs of about 1: a few steps of bfloat16
NUM_HEADS, NUM_KV_HEADS, WIDTH, NUM_KEYS = 32, 8, 128, 2048
SHAPES = tuple(itertools.product((1, 8), (1, 6, 96)))  # B and query tokens
_FEW_KEYS = 128  # for what is slow


def attention_is_right(report: Report, device: Device) -> None:
    """One cell for each shape."""
    for batch_size, num_query in SHAPES:
        name = f"attention, B={batch_size}, Q={num_query}"
        report.attempt(name, lambda: _check(report, device, name, batch_size, num_query))  # noqa: B023


def _check(report: Report, device: Device, name: str, batch_size: int, num_query: int) -> None:
    compared = _compare(torch.device("cuda", 0), device.is_dry, torch.bfloat16, batch_size, num_query)
    report.check(f"{name}: the backend is chosen by us", compared.is_chosen_by_us, str(torch.bfloat16))
    report.check(f"{name}: close to math attention", compared.gap < TOLERANCE, compared.gap)


class Compared(NamedTuple):
    """Our attention beside math attention."""

    is_chosen_by_us: bool  # or else by torch
    gap: float


def _compare(device: torch.device, is_dry: bool, dtype: torch.dtype, batch_size: int, num_query: int) -> Compared:
    """Folded attention under a causal mask against math attention in float32."""
    register_folded_attention()
    is_chosen([device])
    module, groups = nn.Module(), NUM_HEADS // NUM_KV_HEADS
    module.num_key_value_groups = groups
    num_keys = _FEW_KEYS if is_dry else NUM_KEYS
    query, key, value, mask = _inputs(device, dtype, batch_size, num_query, num_keys)
    with folding():
        ours = folded_attention(module, query, key, value, mask)[0].transpose(1, 2)
    wide_key, wide_value = (states.repeat_interleave(groups, 1).float() for states in (key, value))
    with nullcontext() if is_dry else sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(query.float(), wide_key, wide_value, attn_mask=mask.float())
    return Compared(chooses_backend(query, value), float((ours.float() - expected).abs().max()))


def _inputs(
    device: torch.device, dtype: torch.dtype, batch_size: int, num_query: int, num_keys: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and an additive causal mask, bottom-right aligned."""
    query = torch.randn(batch_size, NUM_HEADS, num_query, WIDTH, device=device, dtype=dtype)
    key, value = (torch.randn(batch_size, NUM_KV_HEADS, num_keys, WIDTH, device=device, dtype=dtype) for _ in range(2))
    positions = torch.arange(num_keys - num_query, num_keys, device=device)[:, None]
    is_hidden = torch.arange(num_keys, device=device) > positions  # [Q, T]
    mask = torch.zeros(num_query, num_keys, device=device, dtype=dtype).masked_fill_(is_hidden, -torch.inf)
    return query, key, value, mask.expand(batch_size, 1, -1, -1)
