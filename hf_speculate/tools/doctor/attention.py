"""The attention backend that is chosen, and its distance to torch's math attention."""

import itertools
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_speculate.models.folded_attention import folded_attention, folding, is_chosen, register_folded_attention
from hf_speculate.options.cuda.attention_backends import chooses_backend
from hf_speculate.tools.doctor.site import Check, Site, require
from hf_speculate.tools.doctor.texts import name_of

# Tolerances of outputs of about 1, by dtype: a few steps of it.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
NUM_HEADS, NUM_KV_HEADS, WIDTH, NUM_KEYS = 32, 8, 128, 2048
SHAPES = tuple(itertools.product((1, 8), (1, 6, 96)))  # B and query tokens
_FEW_KEYS = 128  # for what is slow


class Compared(NamedTuple):
    """Our attention beside math attention."""

    is_chosen_by_us: bool  # or else by torch
    gap: float


def attention_checks(dtypes: tuple[torch.dtype, ...]) -> dict[str, Check]:
    """By name, a check in each dtype."""
    return {name_of(dtype): partial(_check, dtype) for dtype in dtypes}


def compare(site: Site, dtype: torch.dtype, batch_size: int, num_query: int) -> Compared:
    """Folded attention under a causal mask against math attention in float32."""
    register_folded_attention()
    is_chosen([site.device])
    module, groups = nn.Module(), NUM_HEADS // NUM_KV_HEADS
    module.num_key_value_groups = groups  # type: ignore[assignment]
    is_gpu = site.device.type == "cuda" and not site.is_simulated
    num_keys = NUM_KEYS if is_gpu else _FEW_KEYS
    query, key, value, mask = _inputs(site.device, dtype, batch_size, num_query, num_keys)
    with folding():
        ours = folded_attention(module, query, key, value, mask)[0].transpose(1, 2)
    wide_key, wide_value = (states.repeat_interleave(groups, 1).float() for states in (key, value))
    with nullcontext() if site.is_simulated else sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(query.float(), wide_key, wide_value, attn_mask=mask.float())
    return Compared(chooses_backend(query, value), float((ours.float() - expected).abs().max()))


def _check(dtype: torch.dtype, site: Site) -> str:
    comparisons = [compare(site, dtype, *shape) for shape in (SHAPES[:2] if site.is_simulated else SHAPES)]
    gap = max(comparison.gap for comparison in comparisons)
    require(gap < TOLERANCES[dtype], f"it is {gap:.3g} away from math attention")
    ours = "flash attention without a mask, memory-efficient attention with one"
    return f"{ours if comparisons[0].is_chosen_by_us else 'as torch chooses'}; {gap:.2g} away from math attention"


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
