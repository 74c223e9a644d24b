"""Drawing one token a row."""

import torch
from torch import Tensor

from ._checks import check_keys, check_logits, check_warp
from ._inputs import Warp
from .backends import operations
from .types import NoiseKeys, Sampled, Stream


@torch.no_grad()
def sample(
    logits: Tensor,
    *,
    keys: NoiseKeys,
    stream: Stream,
    temperature: float | Tensor = 1.0,
    row_cutoffs: Tensor | None = None,
    backend: str = "auto",
) -> Sampled:
    """Draw one token a row and keep the log-sum-exp that a verifier needs of its law.

    Args:
        logits: [B, V], float16, bfloat16, float32 or float64, any strides.
        keys: [B] int64 each; `positions` is that of the drawn token.
        stream: which noise; DRAFT for a drafter, RACE for coupled drafting and plain coupled decoding.
        temperature: divides the logits in float32; a float or [B], >= 0. 0 takes the argmax.
        row_cutoffs: [B], after the temperature; entries below are dropped.
        backend: "auto", "torch" or "triton".

    Returns:
        Ids in [0, V), and the log-sum-exp of the logits after temperature and cutoffs; at temperature 0 their
        maximum, so that the drawn token has probability 1. NaN, +inf or -inf: the row has no law.

    Raises:
        ConfigError: an unknown backend or a bad temperature.
        KernelUnavailableError: backend="triton" where it cannot run.
        ShapeError: a shape, dtype or device that does not fit.
    """
    check_logits("logits", logits, "B, V")
    warp = check_warp(logits, "B", Warp(temperature, row_cutoffs))
    check_keys(keys, logits)
    return operations(backend, logits.device).sample(logits, warp, keys, stream)
