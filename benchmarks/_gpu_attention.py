"""Attention on CUDA: the backend is chosen by us, and close to torch's math backend."""

import itertools
from contextlib import nullcontext
from typing import Any

import torch
from _gpu_calls import K
from _gpu_device import Device
from _gpu_report import Report
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_speculate.models.attention_backends import chooses_backend
from hf_speculate.models.folded_attention import folded_attention, folding, register_folded_attention

SHAPES = tuple(itertools.product((1, 8), (1, K + 1, 96)))  # B and query tokens
NUM_HEADS, NUM_KV_HEADS, WIDTH, NUM_KEYS, DRY_NUM_KEYS = 32, 8, 128, 2048, 128
TOLERANCE = 2e-2  # of outputs of about 1 in bfloat16, whose step is 2^-8 there


def attention_is_right(report: Report, device: Device) -> None:
    """One cell for each shape."""
    register_folded_attention()
    for batch_size, num_query in SHAPES:
        name = f"attention, B={batch_size}, Q={num_query}"
        report.attempt(name, lambda: _compare(report, device, name, batch_size, num_query))  # noqa: B023


def _compare(report: Report, device: Device, name: str, batch_size: int, num_query: int) -> None:
    groups = NUM_HEADS // NUM_KV_HEADS
    module = nn.Module()
    module.num_key_value_groups = groups
    query, key, value, mask = _inputs(batch_size, num_query, DRY_NUM_KEYS if device.is_dry else NUM_KEYS)
    report.check(f"{name}: the backend is chosen by us", chooses_backend(query, value), str(query.dtype))
    with folding():
        ours = folded_attention(module, query, key, value, mask)[0].transpose(1, 2)
    wide = [states.repeat_interleave(groups, 1).float() for states in (key, value)]
    with nullcontext() if device.is_dry else sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(query.float(), *wide, attn_mask=mask.float())
    gap = float((ours.float() - expected).abs().max())
    report.check(f"{name}: close to math attention", gap < TOLERANCE, gap)


def _inputs(batch_size: int, num_query: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and an additive causal mask, bottom-right aligned."""
    how: dict[str, Any] = {"device": "cuda:0", "dtype": torch.bfloat16}
    query = torch.randn(batch_size, NUM_HEADS, num_query, WIDTH, **how)
    key, value = (torch.randn(batch_size, NUM_KV_HEADS, num_keys, WIDTH, **how) for _ in range(2))
    places = torch.arange(num_keys - num_query, num_keys, device="cuda:0")[:, None]
    is_hidden = torch.arange(num_keys, device="cuda:0") > places  # [Q, T]
    mask = torch.zeros(num_query, num_keys, **how).masked_fill_(is_hidden, -torch.inf)
    return query, key, value, mask.expand(batch_size, 1, -1, -1)
