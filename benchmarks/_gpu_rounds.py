"""Waits, launches and cuDNN plans of a round besides the forwards."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from _gpu_calls import DRAFTERS, EAGER, decode, repeated_prompts
from _gpu_device import Device, Models
from _gpu_report import Report

NUM_NEW = 20  # the profiler takes about a second for ten tokens
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9, "seed": 1},
}
# Our launches in a round of K = 5, at most: the tests count operators, of which some launch more than one kernel.
MOST_LAUNCHES = {("model", 1): 30, ("model", 8): 45, ("lookup", 1): 30, ("lookup", 8): 45}


def round_costs(report: Report, device: Device) -> None:
    """One cell for each mode, drafter and number of rows."""
    models = device.small_pair(torch.bfloat16)
    for mode, drafter, batch_size in itertools.product(MODES, DRAFTERS, (1, 8)):
        if device.is_dry and (mode, batch_size) == ("top-p", 8):
            continue  # Triton's interpreter takes long for many sampled rows
        name = f"{mode}, {drafter}, B={batch_size}"
        report.attempt(name, lambda: _count(report, device, models, name, mode, drafter, batch_size))  # noqa: B023


def _count(report: Report, device: Device, models: Models, name: str, mode: str, drafter: str, batch_size: int) -> None:
    inputs = repeated_prompts(models, batch_size)
    options = {**DRAFTERS[drafter], **MODES[mode], **EAGER, "max_new_tokens": NUM_NEW}

    def call(callback: Callable[..., None]) -> Any:
        return decode(models, inputs, drafter, **options, speculation_callback=callback)

    if not device.is_dry:
        call(lambda report: None)  # compiles kernels
    rounds = device.count_rounds(models, call)
    launches = sorted(cost.num_launches for cost in rounds)
    report.cell(what="rounds", name=name, rounds=[tuple(cost) for cost in rounds])
    report.check(f"{name}: no wait but for the verdict", not any(cost.num_waits for cost in rounds), len(rounds))
    report.check(f"{name}: no cuDNN plan", not any(cost.num_plans for cost in rounds), len(rounds))
    if mode == "greedy":
        typical = launches[len(launches) // 2] if launches else None
        is_right = typical is not None and 0 < typical <= MOST_LAUNCHES[drafter, batch_size]
        report.check(f"{name}: launches", is_right, typical)
