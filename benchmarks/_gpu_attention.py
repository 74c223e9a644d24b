"""Attention on CUDA: the backend is chosen by us, and close to torch's math backend."""

import torch
from _gpu_device import Device
from _gpu_report import Report

from hf_speculate.tools.doctor.attention import SHAPES, TOLERANCES, compare
from hf_speculate.tools.doctor.site import Site


def attention_is_right(report: Report, device: Device) -> None:
    """One cell for each shape."""
    for batch_size, num_query in SHAPES:
        name = f"attention, B={batch_size}, Q={num_query}"
        report.attempt(name, lambda: _check(report, device, name, batch_size, num_query))  # noqa: B023


def _check(report: Report, device: Device, name: str, batch_size: int, num_query: int) -> None:
    site = Site(torch.device("cuda", 0), is_simulated=device.is_dry)
    compared = compare(site, torch.bfloat16, batch_size, num_query)
    report.check(f"{name}: the backend is chosen by us", compared.is_chosen_by_us, str(torch.bfloat16))
    report.check(f"{name}: close to math attention", compared.gap < TOLERANCES[torch.bfloat16], compared.gap)
