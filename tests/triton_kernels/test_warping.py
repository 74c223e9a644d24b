"""Temperature, top-k, top-p and min-p in one launch cut where transformers' warpers do, but for the border's bin."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_speculate.triton_kernels import ConfigError, ShapeError, warp_logits
from hf_speculate.triton_kernels._inputs import BINS_PER_NAT
from tests.triton_kernels.on_triton import BACKENDS, on, on_triton

pytest.importorskip("triton", reason="needs Triton")

RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_p": 1.0, "top_k": 10**6},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
]
WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


def make_logits(num_rows: int, vocab_size: int) -> Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))


def by_transformers(logits: Tensor, rule: dict[str, Any]) -> Tensor:
    scores = logits.float()
    for name, value in rule.items():
        scores = WARPERS[name](value)(None, scores)
    return scores


@pytest.mark.parametrize("vocab_size", [1, 5000])
@pytest.mark.parametrize("rule", RULES)
def test_the_kernel_cuts_as_its_twin(rule: dict[str, Any], vocab_size: int) -> None:
    logits = make_logits(3, vocab_size)
    logits[1, 1::3] = -torch.inf
    assert torch.equal(on_triton(warp_logits, logits, **rule), warp_logits(logits, **rule, backend="torch"))


@pytest.mark.parametrize("rule", RULES[1:])
def test_what_is_kept_is_what_transformers_keeps_and_the_rest_of_a_bin(rule: dict[str, Any]) -> None:
    logits = make_logits(8, 3000)
    ours, theirs = warp_logits(logits, **rule, backend="torch"), by_transformers(logits, rule)
    kept, wanted = ours > -torch.inf, theirs > -torch.inf
    assert (kept | ~wanted).all()
    assert torch.equal(ours[wanted], theirs[wanted])
    lowest = theirs.masked_fill(~wanted, torch.inf).amin(-1, keepdim=True)
    assert (ours[kept & ~wanted] >= (lowest - 2 / BINS_PER_NAT).expand_as(ours)[kept & ~wanted]).all()
    if "top_k" in rule and rule["top_k"] < 3000:
        assert kept.sum() < 3000  # the control: something is cut


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_every_dtype_and_stride_give_the_float32_result(dtype: torch.dtype) -> None:
    logits = make_logits(4, 600).to(dtype)
    strided = torch.cat([logits, logits], dim=1)[:, :600]
    rule = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    wanted = warp_logits(logits.float(), **rule, backend="torch")
    assert torch.equal(on_triton(warp_logits, strided, **rule), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_distribution_are_left_as_they_are(backend: str) -> None:
    logits = make_logits(3, 50)
    logits[0, 7], logits[1, 7] = torch.nan, torch.inf
    logits[2] = -torch.inf
    warped = on(backend, warp_logits, logits, top_k=3)
    assert torch.equal(warped.nan_to_num(5.0), logits.nan_to_num(5.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_token_outweighs_all_others(backend: str) -> None:
    logits = torch.full((1, 4096), -40.0)
    logits[0, 9] = 0.0
    assert (on(backend, warp_logits, logits, top_p=0.5) > -torch.inf).nonzero().tolist() == [[0, 9]]


@pytest.mark.parametrize(
    ("rule", "name"),
    [({"temperature": 0.0}, "temperature"), ({"temperature": -1.0}, "temperature"), ({"top_k": 0}, "top_k")]
    + [({"top_p": value}, "top_p") for value in (0.0, 1.5)]
    + [({"min_p": value}, "min_p") for value in (-0.1, 1.1)],
)
def test_numbers_out_of_range_are_refused(rule: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        warp_logits(make_logits(1, 8), **rule)
    with pytest.raises(ShapeError, match=r"logits must be \[B, V\]"):
        warp_logits(torch.zeros(1, 2, 8))
