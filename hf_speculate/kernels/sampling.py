"""Sample one token per row."""

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
    """Sample one token per row; also return the log-sum-exp for the verifiers.

    Args:
        logits: [B, V], float16, bfloat16, float32 or float64, any strides.
        keys: [B] int64 each, at the position of the sampled token.
        stream: DRAFT for a drafter, RACE for coupled drafting and for plain coupled decoding.
        temperature: divides the logits in float32; a float or [B], >= 0; 0 means argmax.
        row_cutoffs: [B], thresholds for the scaled logits; smaller logits are masked.
        backend: "auto", "torch" or "triton".

    Returns:
        Ids in [0, V), and the log-sum-exp of the logits after temperature and cutoffs. At
        temperature 0, the log-sum-exp is the maximum logit, which gives the argmax a probability of
        1. If the row is not a valid distribution, it is NaN, +inf or -inf.

    Raises:
        ConfigError: the backend is unknown or the temperature is invalid.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: a tensor has the wrong shape, dtype or device.
    """
    check_logits("logits", logits, "B, V")
    warp = check_warp(logits, "B", Warp(temperature, row_cutoffs))
    check_keys(keys, logits)
    return operations(backend, logits.device).sample(logits, warp, keys, stream)
