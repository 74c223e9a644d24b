"""Texts in half precision: each greedy token is one that math attention might choose too."""

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from _gpu_calls import DRAFTERS, EAGER, GRAPHS, decode, repeated_prompts
from _gpu_device import Device, Models
from _gpu_report import Report
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

import hf_speculate

# How far below the largest logit of another attention backend an emitted token may lie: two steps of bfloat16 at 16.
MAX_GAP = 0.25
GREEDY: dict[str, Any] = {"do_sample": False}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {**GREEDY, **EAGER},
    "greedy, graphs": {**GREEDY, **GRAPHS},
    "rejection, top_k=1": {"do_sample": True, "top_k": 1, "verifier": "rejection", "seed": 1, **EAGER},
    "typical": {**GREEDY, "verifier": "typical", **EAGER},
}
LOSSY = ("typical",)


def exactness(report: Report, device: Device) -> None:
    """Both dtypes of half precision, with cuDNN attention allowed and not."""
    settings = list(itertools.product((torch.bfloat16, torch.float16), (True, False)))
    for dtype, allows_cudnn in settings[:1] if device.is_dry else settings:
        models = device.small_pair(dtype)
        torch.backends.cuda.enable_cudnn_sdp(allows_cudnn)
        texts(report, device, models, f", {dtype}, cuDNN {'on' if allows_cudnn else 'off'}")
        torch.backends.cuda.enable_cudnn_sdp(True)


def texts(report: Report, device: Device, models: Models, name: str, ways: tuple[str, ...] = tuple(WAYS)) -> None:
    """One cell for each way to decode, drafter and number of rows; `name` ends their names."""
    for way, drafter, batch_size in itertools.product(ways, DRAFTERS, (2,) if device.is_dry else (1, 8)):
        if drafter == "lookup" and way not in ("greedy", "rejection, top_k=1"):
            continue
        cell = f"{way}, {drafter}, B={batch_size}{name}"
        report.attempt(cell, lambda: _decode(report, device, models, cell, way, drafter, batch_size))  # noqa: B023


def _decode(report: Report, device: Device, models: Models, cell: str, way: str, drafter: str, batch_size: int) -> None:
    inputs, stats = repeated_prompts(models, batch_size), hf_speculate.SpeculationStats()
    options = {**DRAFTERS[drafter], **WAYS[way], "max_new_tokens": 4 if device.is_dry else 64}
    ours = decode(models, inputs, drafter, **options, speculation_stats=stats)
    gap = gap_to_argmax(models.target, inputs, ours, device.is_dry)
    report.check(f"{cell}: largest gap to the argmax", way in LOSSY or gap <= MAX_GAP, gap)
    if "graphs" in way:
        report.check(f"{cell}: from graphs", len(stats.graphed) == 2, stats.fallbacks)
    if way == "greedy":
        plain = models.target.generate(**inputs, do_sample=False, max_new_tokens=options["max_new_tokens"])
        report.cell(
            what="gap", name=cell, gap=gap, gap_of_plain=gap_to_argmax(models.target, inputs, plain, device.is_dry)
        )


def gap_to_argmax(target: PreTrainedModel, inputs: Mapping[str, Tensor], output: Tensor, is_dry: bool) -> float:
    """How far below the largest logit the chosen tokens lie at most, in one forward with math attention."""
    prompt_len, eos = inputs["input_ids"].shape[1], target.generation_config.eos_token_id
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(output[:, prompt_len:])], dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad(), nullcontext() if is_dry else sdpa_kernel(SDPBackend.MATH):
        logits = target(input_ids=output, attention_mask=mask, position_ids=positions).logits.float()
    chosen = output[:, prompt_len:, None]
    logits = logits[:, prompt_len - 1 : -1]
    gaps = logits.amax(-1) - logits.gather(-1, chosen)[..., 0]  # [B, N]
    if eos is not None:  # what follows an EOS token is padding
        is_end = torch.isin(chosen[..., 0], torch.tensor(eos, device=chosen.device))
        gaps = gaps.masked_fill((is_end.cumsum(1) - is_end.long()) > 0, 0.0)
    return float(gaps.max())
