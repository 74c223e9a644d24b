"""Compare temperature and cutoffs in one operation with transformers' warpers, within one bin."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_speculate.kernels import Stream, sample, warp_logits
from hf_speculate.kernels._inputs import BINS_PER_NAT
from hf_speculate.kernels.warped_draws import WarpedDraws
from tests.kernels.distributions import make_keys
from tests.kernels.on_triton import BACKENDS, DEVICE, moved, on, on_triton
from tests.support.fake_cuda import FakeCuda

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
    return 3 * torch.randn(
        num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)
    )


def by_transformers(logits: Tensor, rule: dict[str, Any]) -> Tensor:
    scores = logits.float()
    for name, value in rule.items():
        scores = WARPERS[name](value)(None, scores)
    return scores


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, torch.float32), (5000, torch.float16), (700, torch.float64)]
)
@pytest.mark.parametrize("rule", RULES)
def test_kernel_cuts_every_dtype_and_stride_as_the_reference(
    rule: dict[str, Any], vocab_size: int, dtype: torch.dtype
) -> None:
    logits = make_logits(3, vocab_size).to(dtype)
    logits[1, 1::3] = -torch.inf
    strided = torch.cat([logits, logits], dim=1)[:, :vocab_size]
    assert torch.equal(
        on_triton(warp_logits, strided, **rule),
        warp_logits(logits.float(), **rule, backend="torch"),
    )


@pytest.mark.parametrize("rule", RULES[1:])
def test_cutoffs_keep_transformers_tokens_up_to_one_bin(rule: dict[str, Any]) -> None:
    logits = make_logits(8, 3000)
    ours, theirs = warp_logits(logits, **rule, backend="torch"), by_transformers(logits, rule)
    is_kept, wanted = ours > -torch.inf, theirs > -torch.inf
    assert (is_kept | ~wanted).all()
    assert torch.equal(ours[wanted], theirs[wanted])
    lowest = theirs.masked_fill(~wanted, torch.inf).amin(-1, keepdim=True)
    assert (
        ours[is_kept & ~wanted] >= (lowest - 2 / BINS_PER_NAT).expand_as(ours)[is_kept & ~wanted]
    ).all()
    if "top_k" in rule and rule["top_k"] < 3000:
        assert is_kept.sum() < 3000  # control: some tokens are cut


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_distribution_stay_unchanged(backend: str) -> None:
    logits = torch.full((4, 4096), -40.0)
    logits[:3, 7] = torch.tensor([torch.nan, torch.inf, 0.0])
    logits[3] = -torch.inf
    warped = on(backend, warp_logits, logits, top_k=3, top_p=0.5)
    left = [0, 1, 3]
    assert torch.equal(warped[left].nan_to_num(5.0), logits[left].nan_to_num(5.0))
    assert (warped[2] > -torch.inf).nonzero().tolist() == [[7]]


@pytest.mark.parametrize(("stream", "keeps_logits"), [(Stream.DRAFT, True), (Stream.RACE, False)])
def test_warped_draws_are_those_of_sample_from_warped_logits(
    stream: Stream, keeps_logits: bool
) -> None:
    keys, rule = (
        make_keys(3, rounds=2, positions=11),
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    )
    logits = torch.stack(
        [make_logits(3, 5001), make_logits(3, 5000)[:, [0, *range(5000)]]], dim=1
    ).bfloat16()
    logits[1, 1, 7] = torch.nan
    there = "cuda:0"
    with nullcontext() if DEVICE == "cuda" else FakeCuda():  # it has atomics, unlike a CPU
        assert WarpedDraws.can_run("auto", torch.device(there))
        draws = WarpedDraws(moved(keys, there), stream, 2, keeps_logits, rule)
        drawn = [moved(draws.draw(step), "cpu") for step in logits.to(there).unbind(1)]
        kept, sums = draws.logits().cpu(), draws.logsumexps().cpu()
    for step, (token_ids, warped) in enumerate(drawn):
        wanted = on_triton(warp_logits, logits[:, step], **rule)
        here = keys._replace(positions=keys.positions + step)
        sampled = on_triton(sample, wanted, keys=here, stream=stream)
        assert torch.equal(token_ids, sampled.token_ids)
        assert torch.equal(warped.nan_to_num(5.0), wanted.nan_to_num(5.0))
        assert torch.equal(sums[:, step].nan_to_num(5.0), sampled.logsumexp.nan_to_num(5.0))
    expected = torch.stack([warped for _, warped in drawn[0 if keeps_logits else 1 :]], dim=1)
    assert torch.equal(kept.nan_to_num(5.0), expected.nan_to_num(5.0))
