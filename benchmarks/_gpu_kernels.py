"""The Triton kernels against their torch references on the same device: results, and times in CUDA graphs."""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from _gpu_calls import K
from _gpu_device import Device
from _gpu_report import Report
from torch import Tensor

from hf_speculate.kernels import (
    NoiseKeys,
    Stream,
    row_seeds,
    sample,
    verify_block,
    verify_coupled,
    verify_greedy,
    verify_rejection,
    verify_typical,
    warp_logits,
)
from hf_speculate.options.cuda.kernel_operations import OPERATIONS, make_round
from hf_speculate.options.cuda.kernel_trial import SAMPLE, WARP, num_unequal, results_of

ALIGNED_VOCAB_SIZE, SHIFTED_VOCAB_SIZE = 128_256, 50_257  # rows that all start at a multiple of 16 bytes; and others
DRY_VOCAB_SIZE = 96
TIMES = 10  # a graph launches what is timed as often: replaying takes the host longer than the shortest of them
GRAPH_REPEATS, EAGER_REPEATS = 10, 20
BATCH_SIZES, VOCAB_SIZES = (1, 8, 32, 128), (32_000, 128_256, 151_936)
FIRST_BATCH_SIZES, FIRST_VOCAB_SIZES = (1, 8, 32), (151_936,)
# What decoding runs unless another verifier is asked for.
COMMON = ("greedy", "rejection with draft sums", "point mass", SAMPLE, WARP)
OTHERS = tuple(name for name in OPERATIONS if name not in COMMON)


def agree(report: Report, device: Device, names: Iterable[str], vocab_size: int, needs_s: float = 0.0) -> None:
    """One cell for each operation: the kernels give what the reference gives, log-sum-exps up to round-off.

    No cell begins when less than `needs_s` is left.
    """
    vocab_size = DRY_VOCAB_SIZE + vocab_size % 16 if device.is_dry else vocab_size
    # The interpreter of Triton 3.6 lacks the bfloat16 constants that rows which start anywhere need.
    dtype = torch.float16 if device.is_dry and vocab_size % 16 else torch.bfloat16
    for name in names:
        cell = f"{name}, V={vocab_size}"
        report.attempt(cell, lambda: _compare(report, cell, name, vocab_size, dtype), needs_s=needs_s)  # noqa: B023


def _compare(report: Report, cell: str, name: str, vocab_size: int, dtype: torch.dtype) -> None:
    num_rows = 3
    target, ids, draft = (tensor.to("cuda:0") for tensor in make_round(num_rows, K, vocab_size))
    target, draft, keys = target.to(dtype), draft.to(dtype), _keys(num_rows)
    kernel, reference = (results_of(name, target, ids, draft, keys, backend) for backend in ("triton", "torch"))
    differences = list(map(num_unequal, kernel, reference))
    report.check(f"{cell}: the kernels agree with the reference", not any(differences), differences)


def kernel_times(
    report: Report,
    device: Device,
    batch_sizes: Iterable[int] = BATCH_SIZES,
    vocab_sizes: Iterable[int] = VOCAB_SIZES,
) -> None:
    """One cell for each operation and size: microseconds of the kernels and of the reference."""
    sizes = [(1, 64)] if device.is_dry else list(itertools.product(batch_sizes, vocab_sizes))
    for batch_size, vocab_size in sizes:
        target = torch.randn(batch_size, K + 1, vocab_size, device="cuda:0", dtype=torch.bfloat16)
        draft = torch.randn(batch_size, K, vocab_size, device="cuda:0", dtype=torch.bfloat16)
        for name, (run, num_rows) in _timed(target, draft).items():
            num_bytes = batch_size * num_rows * vocab_size * target.element_size()
            cell = f"{name}, B={batch_size}, V={vocab_size}"
            values = {"operation": name, "batch_size": batch_size, "vocab_size": vocab_size}
            report.attempt(cell, lambda: _time(report, device, run, num_bytes, values))  # noqa: B023


def _timed(target: Tensor, draft: Tensor) -> dict[str, tuple[Callable[..., Any], int]]:
    """Operations on target [B, K+1, V] and draft [B, K, V], each with the rows of logits that it must read."""
    ids, keys = draft.float().argmax(-1), _keys(len(target))
    sums = draft.float().logsumexp(-1)
    dense, saved = {"keys": keys}, {"keys": keys, "draft_logsumexp": sums}
    return {
        "greedy": (partial(verify_greedy, target, ids), K + 1),
        "rejection, saved sums": (partial(verify_rejection, target, ids, draft, **saved), K + 2),
        "sample": (partial(sample, target[:, 0], keys=keys, stream=Stream.DRAFT), 1),
        "warp_logits": (partial(warp_logits, target[:, 0], temperature=0.7, top_k=50, top_p=0.9), 1),
        "point mass": (partial(verify_rejection, target, ids, **dense), K + 1),
        "rejection": (partial(verify_rejection, target, ids, draft, **dense), 2 * K + 1),
        "typical": (partial(verify_typical, target, ids), K + 1),
        "coupled": (partial(verify_coupled, target, ids, **dense), K + 1),
        "block": (partial(verify_block, target, ids, draft, **dense), 2 * K + 1),
    }


def _time(report: Report, device: Device, run: Callable[..., Any], num_bytes: int, values: dict[str, Any]) -> None:
    """From a graph, which hides what launches cost the host, and as decoding calls it: from the host, back to back."""
    us: dict[str, float | None] = {}
    for backend in ("triton", "torch"):
        call = partial(run, backend=backend)
        device.seconds(call, 3)  # compiles
        us[f"{backend}_eager"] = device.seconds(call, EAGER_REPEATS) * 1e6
        try:
            replay = device.graphed(call, TIMES)
        except RuntimeError as error:
            report.leave_out(f"{backend} from a graph: {values}", str(error)[:500])
            us[backend] = None
        else:
            device.seconds(replay, 1)
            us[backend] = device.seconds(replay, GRAPH_REPEATS) * 1e6 / TIMES
    gb_per_s = None if us["triton"] is None else num_bytes / us["triton"] / 1e3
    names = {"us": "triton", "reference_us": "torch", "eager_us": "triton_eager", "reference_eager_us": "torch_eager"}
    report.cell(what="kernel", **values, **{name: us[key] for name, key in names.items()}, gb_per_s=gb_per_s)


def _keys(num_rows: int) -> NoiseKeys:
    numbers = torch.arange(num_rows, device="cuda:0")
    return NoiseKeys(row_seeds(1, num_rows, device="cuda:0"), numbers, numbers)
