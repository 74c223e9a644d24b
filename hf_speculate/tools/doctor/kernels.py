"""Triton kernels against their torch references, on ordinary rows and on hostile ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_speculate.kernels import NoiseKeys, Stream, row_seeds, sample, warp_logits
from hf_speculate.kernels.backends import runs_kernels
from hf_speculate.tools.doctor.kernel_operations import OPERATIONS, FaultyRound, make_faulty_round, make_round
from hf_speculate.tools.doctor.site import Check, NotHere, Site, require

# Tolerance of numbers up to 20, summed in another order.
TOLERANCE = 1e-4
SAMPLE, WARP = "sample", "warp_logits"
CHECKED = ("greedy", "rejection with draft sums", "point mass", "rejection", "block", "coupled", "typical")
NUM_ROWS = 3


def runs_of(name: str, target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, backend: str) -> list[Tensor]:
    """The tensors that an operation gives for a round; `name` is a key of `OPERATIONS`, `SAMPLE` or `WARP`."""
    run: Callable[..., Any]
    if name == SAMPLE:
        run = partial(sample, target[:, 0], keys=keys, stream=Stream.DRAFT)
    elif name == WARP:
        run = partial(warp_logits, target[:, 0], temperature=0.7, top_k=50, top_p=0.9)
    else:
        run = partial(OPERATIONS[name], target, ids, draft, keys)
    result = run(backend=backend)
    return [result] if isinstance(result, Tensor) else list(result)


def num_different(mine: Tensor, twin: Tensor) -> int:
    """How many entries differ; floating-point numbers may by `TOLERANCE`, and NaN is NaN."""
    if not mine.is_floating_point():
        return int((mine != twin).sum())
    is_close = (mine == twin) | ((mine - twin).abs() <= TOLERANCE) | (mine.isnan() & twin.isnan())
    return int(is_close.logical_not().sum())  # infinities are equal


def kernel_checks() -> dict[str, Check]:
    """By name, a check of each operation on each kind of rows."""
    names = (*CHECKED, SAMPLE, WARP)
    checks: dict[str, Check] = {f"{name}, ordinary rows": partial(_agree, name) for name in names}
    return checks | {f"{name}, hostile rows": partial(_agree, name, is_hostile=True) for name in CHECKED}


def _agree(name: str, site: Site, is_hostile: bool = False) -> str:
    if not runs_kernels("auto", site.device):
        raise NotHere("Triton is not installed, is too old or does not serve this device")
    sizes = {"num_draft_tokens": site.num_draft_tokens, "vocab_size": site.vocab_size}
    faulty = make_faulty_round(name, 1, **sizes) if is_hostile else None
    target, ids, draft = make_round(NUM_ROWS, **sizes) if faulty is None else faulty[:3]
    # The interpreter of Triton 3.6 lacks the bfloat16 constants that rows which start anywhere need.
    dtype = torch.float16 if site.is_simulated else torch.bfloat16
    target, ids, draft = target.to(site.device, dtype), ids.to(site.device), draft.to(site.device, dtype)
    numbers = torch.arange(len(target), device=site.device)
    keys = NoiseKeys(row_seeds(1, len(target), device=site.device), numbers, numbers)
    kernel, reference = (runs_of(name, target, ids, draft, keys, backend) for backend in ("triton", "torch"))
    if faulty is not None:
        _forgive_any_token(faulty, kernel, reference, site)
    differences = [num_different(mine, twin) for mine, twin in zip(kernel, reference, strict=True)]
    require(not any(differences), f"{sum(differences)} numbers differ from the reference")
    return ""


def _forgive_any_token(faulty: FaultyRound, kernel: list[Tensor], reference: list[Tensor], site: Site) -> None:
    """Let tokens of the vocabulary that come from a hostile row of the target count as those of the reference."""
    positions, is_target = faulty.positions.to(site.device), faulty.is_target.to(site.device)
    (mine, *_), (twin, num_accepted, *_) = kernel, reference  # token_ids, num_accepted, status
    columns = torch.arange(mine.shape[1], device=site.device)
    is_any = (columns == positions[:, None]) & (is_target & (num_accepted == positions))[:, None]  # [B, K+1]
    kernel[0] = torch.where(is_any & (mine >= 0) & (mine < site.vocab_size), twin, mine)
