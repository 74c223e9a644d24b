"""Warping of draft logits: temperature, top-k, top-p and min-p in one operation."""

import math

import torch
from torch import Tensor

from ._checks import check_logits, check_temperature
from ._inputs import Cut
from .backends import operations
from .errors import ConfigError


@torch.no_grad()
def warp_logits(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Apply temperature, then top-k, top-p and min-p, in three launches of the kernels.

    The top 16 nats of a row are divided into 1,024 bins, and the row is cut between two bins. All
    entries in the bin of the last kept entry are kept, and entries more than 16 nats below the
    largest are always dropped. The result differs from an exact cut by a few tokens at the
    boundary. Use this function for drafts, whose distribution is free as long as the verifier gets
    the same logits.

    Args:
        logits: [B, V], float16, bfloat16, float32 or float64, any strides.
        temperature: divides the logits in float32; > 0.
        top_k: number of entries to keep, >= 1; None for all.
        top_p: share of the probability to keep, in (0, 1]; None for all.
        min_p: smallest probability to keep, as a share of the largest, in [0, 1]; None for 0.
        backend: "auto", "torch" or "triton".

    Returns:
        [B, V] float32, -inf for dropped entries. A row with a NaN, a +inf, or only -inf is not cut.

    Raises:
        ConfigError: the backend is unknown, or a number is out of range.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: the shape or dtype is not supported.
    """
    check_logits("logits", logits, "B, V")
    rule = cut_of(logits.shape[-1], temperature, top_k, top_p, min_p)
    return operations(backend, logits.device).cut(logits, float(temperature), rule)


def cut_of(
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Cut:
    """Check the arguments of `warp_logits`; return its cut."""
    check_temperature(temperature)
    if temperature == 0.0:
        raise ConfigError("temperature must be > 0, got 0.0; take the argmax instead")
    ranges = {"top_k": (top_k, 1, math.inf), "top_p": (top_p, 0.0, 1.0), "min_p": (min_p, 0.0, 1.0)}
    for name, (value, min_value, max_value) in ranges.items():
        if value is not None and not (
            min_value <= value <= max_value and (value > 0 or name == "min_p")
        ):
            raise ConfigError(
                f"{name} must be in {min_value}..{max_value}, got {value}; leave it out to keep "
                "every entry"
            )
    return Cut(
        vocab_size if top_k is None else min(top_k, vocab_size),
        2.0 if top_p is None or top_p == 1.0 else top_p,
        -math.log(min_p) if min_p else math.inf,
    )
