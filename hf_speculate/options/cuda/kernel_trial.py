"""Kernel trial: compare Triton kernels with their torch references before "auto" uses them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hf_speculate.config import SpeculationConfig
from hf_speculate.kernels import NoiseKeys, Stream, row_seeds, sample, warp_logits
from hf_speculate.kernels.backends import runs_kernels
from hf_speculate.kernels.warped_draws import WarpedDraws
from hf_speculate.options.cuda.kernel_operations import (
    OPERATIONS,
    FaultyRound,
    make_faulty_round,
    make_round,
)
from hf_speculate.stats import SpeculationStats

# Tolerance for numbers up to 20 that are summed in another order.
TOLERANCE = 1e-4
SAMPLE, WARP, WARPED_DRAW = "sample", "warp_logits", "warped draw"
RULE: dict[str, Any] = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
NUM_ROWS, NUM_DRAFT_TOKENS = 2, 3
# Verifier -> operations used by its calls. Rejection may replace block verification.
_REJECTION = ("point mass", "rejection with draft sums")
_OF_VERIFIER = {
    "greedy": ("greedy",),
    "rejection": _REJECTION,
    "block": ("block with draft sums", *_REJECTION),
    "coupled": ("coupled",),
    "typical": ("typical", "typical, sampled"),
}
_warn_once = cache(logging.getLogger("hf_speculate").warning)


def with_working_kernels(
    config: SpeculationConfig,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    vocab_size: int,
    *,
    samples: bool,
    is_processed: bool,
    stats: SpeculationStats,
) -> SpeculationConfig:
    """Return the settings, with torch instead of Triton if a kernel fails on one of the devices.

    An operation is compared on its first use with a device, dtype and vocabulary size. The result
    is remembered for the rest of the process.

    Args:
        config: settings of a call whose `verifier_backend` is "auto".
        devices: devices of the models.
        dtype: dtype of the models' logits.
        vocab_size: columns of the target's logits.
        samples: whether the call samples.
        is_processed: whether logits processors change the logits, to float32.
        stats: records the reason.
    """
    verifiers = [config.verifier or ""]
    if config.relax_only_inside is not None:  # a lossless verifier decides elsewhere
        verifiers.append("rejection" if samples else "greedy")
    scored = torch.float32 if is_processed else dtype
    checks = [(name, scored) for verifier in verifiers for name in _OF_VERIFIER.get(verifier, ())]
    checks += [(SAMPLE, scored)] * samples + [(WARP, dtype), (WARPED_DRAW, dtype)] * (
        samples and is_processed
    )
    for device in dict.fromkeys(device for device in devices if runs_kernels("auto", device)):
        for name, of_rows in checks:
            try:
                problem = _problem(name, device, of_rows, vocab_size)
            except torch.OutOfMemoryError:  # not remembered
                problem = "which cannot be compared with their reference in the device's memory"
            if problem:
                reason = f"torch in place of Triton kernels, {problem}"
                _warn_once(reason)
                stats.add_fallback(reason)
                return replace(config, verifier_backend="torch")
    return config


@cache
def _problem(name: str, device: torch.device, dtype: torch.dtype, vocab_size: int) -> str:
    """Describe how an operation fails; empty if it agrees with its reference."""
    try:
        num_unequal_numbers = num_different(name, device, dtype, vocab_size, NUM_DRAFT_TOKENS)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001, whatever Triton, its compiler or the driver raises
        line = next(iter(str(error).strip().splitlines()), "")
        return f"because {name} raises {type(error).__name__}: {line[:200]}"
    return (
        f"because {name} differs from its reference in {num_unequal_numbers} numbers on {device}"
        if num_unequal_numbers
        else ""
    )


def num_different(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    vocab_size: int,
    num_draft_tokens: int,
    *,
    is_hostile: bool = False,
) -> int:
    """Count the numbers that differ between the results of an operation and its reference.

    Args:
        name: key of `OPERATIONS`, or one of the three names above.
        device: a CUDA device.
        dtype: dtype of the logits.
        vocab_size: V.
        num_draft_tokens: K.
        is_hostile: whether rows hold NaN, infinities and ids outside the vocabulary; only for keys
            of `OPERATIONS`.
    """
    sizes = {"num_draft_tokens": num_draft_tokens, "vocab_size": vocab_size}
    faulty = make_faulty_round(name, 1, **sizes) if is_hostile else None
    target, ids, draft = make_round(NUM_ROWS, **sizes) if faulty is None else faulty[:3]
    target, ids, draft = target.to(device, dtype), ids.to(device), draft.to(device, dtype)
    numbers = torch.arange(len(target), device=device)
    keys = NoiseKeys(row_seeds(1, len(target), device=device), numbers, numbers)
    kernel, reference = (
        results_of(name, target, ids, draft, keys, backend) for backend in ("triton", "torch")
    )
    if faulty is not None:
        _forgive_any_token(faulty, kernel, reference, vocab_size)
    return sum(map(num_unequal, kernel, reference))


def results_of(
    name: str, target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, backend: str
) -> list[Tensor]:
    """Run an operation on a round and return its tensors; `name` as in `num_different`."""
    run: Callable[..., Any]
    if name == SAMPLE:
        run = partial(sample, target[:, 0], keys=keys, stream=Stream.DRAFT)
    elif name == WARP:
        run = partial(warp_logits, target[:, 0], **RULE)
    elif name == WARPED_DRAW:
        run = partial(_draw_warped, target[:, 0], keys)
    else:
        run = partial(OPERATIONS[name], target, ids, draft, keys)
    result = run(backend=backend)
    return [result] if isinstance(result, Tensor) else list(result)


def _draw_warped(logits: Tensor, keys: NoiseKeys, *, backend: str) -> list[Tensor]:
    """Return the warped logits, the drawn token and the log-sum-exp."""
    if WarpedDraws.can_run(backend, logits.device):
        draws = WarpedDraws(keys, Stream.DRAFT, 1, True, RULE)
        token_ids, warped = draws.draw(logits)
        return [warped, token_ids, draws.logsumexps()[:, 0]]
    warped = warp_logits(logits, **RULE, backend=backend)
    return [warped, *sample(warped, keys=keys, stream=Stream.DRAFT, backend=backend)]


def num_unequal(result: Tensor, reference: Tensor) -> int:
    """Count unequal entries.

    Floating-point numbers may differ by `TOLERANCE`, and NaN equals NaN.
    """
    if not result.is_floating_point():
        return int((result != reference).sum())
    is_close = (
        (result == reference)
        | ((result - reference).abs() <= TOLERANCE)
        | (result.isnan() & reference.isnan())
    )
    return int(is_close.logical_not().sum())  # infinities are equal


def _forgive_any_token(
    faulty: FaultyRound, kernel: list[Tensor], reference: list[Tensor], vocab_size: int
) -> None:
    """Accept any token of the vocabulary for a hostile row of the target."""
    (token_ids, *_), (expected, num_accepted, *_) = (
        kernel,
        reference,
    )  # token_ids, num_accepted, status
    positions, is_target = (
        faulty.positions.to(token_ids.device),
        faulty.is_target.to(token_ids.device),
    )
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    # [B, K+1]
    is_any = (columns == positions[:, None]) & (is_target & (num_accepted == positions))[:, None]
    kernel[0] = torch.where(
        is_any & (token_ids >= 0) & (token_ids < vocab_size), expected, token_ids
    )
