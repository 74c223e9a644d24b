"""The parts of `on_gpu.py`: functions of a report and a device."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import _gpu_tests
import numpy
import torch
import triton
from _gpu_attention import attention_is_right
from _gpu_device import Device
from _gpu_kernels import (
    ALIGNED_VOCAB_SIZE,
    COMMON,
    FIRST_BATCH_SIZES,
    FIRST_VOCAB_SIZES,
    OTHERS,
    SHIFTED_VOCAB_SIZE,
    agree,
    kernel_times,
)
from _gpu_report import Report
from _gpu_rounds import round_costs
from _gpu_speed import compilation, end_to_end
from _gpu_texts import exactness, texts
from _harness import copy_rate, provenance

TESTS, KERNEL_TESTS = "tests marked gpu", "tests of the kernels"
FOR_TESTS_S = 20.0  # in which those that have begun are ended and counted
FIRST_WAYS = ("greedy", "greedy, graphs", "rejection, top_k=1")
Part = Callable[[Report, Device], None]


def environment_of(commit: str) -> dict[str, Any]:
    """Versions, device and revision."""
    environment = provenance()
    versions = {"triton": triton.__version__, "numpy": numpy.__version__, "cuda": torch.version.cuda}
    environment["versions"] |= versions | {"cudnn": torch.backends.cudnn.version()}
    free, total = torch.cuda.mem_get_info()
    memory = {"free_gb": free / 1e9, "total_gb": total / 1e9, "num_cpus": os.cpu_count()}
    return environment | memory | ({"commit": commit} if commit else {})


def kernels_and_texts(report: Report, device: Device) -> None:
    """What decoding needs to be right, the commonest first; the tests that need a GPU run beside it."""
    with _gpu_tests.beside(_gpu_tests.marked_gpu(), device.is_dry) as run:
        agree(report, device, COMMON, ALIGNED_VOCAB_SIZE)
        texts(report, device, device.small_pair(torch.bfloat16), "", FIRST_WAYS)
        attention_is_right(report, device)
        agree(report, device, COMMON, SHIFTED_VOCAB_SIZE, needs_s=FOR_TESTS_S)
        agree(report, device, OTHERS, ALIGNED_VOCAB_SIZE, needs_s=FOR_TESTS_S)
        _gpu_tests.await_tests(report, device, TESTS, run)


def kernel_tests(report: Report, device: Device) -> None:
    """The tests of the kernels that run with and without a GPU."""
    _copy_rate(report, device)
    with _gpu_tests.beside(_gpu_tests.KERNELS, device.is_dry) as run:
        _gpu_tests.await_tests(report, device, KERNEL_TESTS, run)


def everything_right(report: Report, device: Device) -> None:
    """All checks that do not time anything."""
    kernels_and_texts(report, device)
    kernel_tests(report, device)


def _copy_rate(report: Report, device: Device) -> None:
    if device.is_dry:
        report.leave_out("copy rate", "the device is simulated")
    else:
        rate = partial(copy_rate, torch.device("cuda:0"))
        report.attempt("copy rate", lambda: report.cell(what="copy rate", gb_per_s=rate() / 1e9))


PARTS: dict[str, Part] = {
    "1": everything_right,
    "2": exactness,
    "3": round_costs,
    "4": kernel_times,
    "5": end_to_end,
    "6": compilation,
}
FIRST_LIGHT: dict[str, Part] = {
    "kernels_and_texts": kernels_and_texts,
    "end_to_end": end_to_end,
    "rounds": round_costs,
    "kernel_times": partial(kernel_times, batch_sizes=FIRST_BATCH_SIZES, vocab_sizes=FIRST_VOCAB_SIZES),
    "kernel_tests": kernel_tests,
}
