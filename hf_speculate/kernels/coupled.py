"""Coupled verification, which compares drafted tokens with the target's own samples."""

import torch
from torch import Tensor

from ._checks import check_keys, check_round, check_warp
from ._inputs import Round, Warp
from .backends import operations
from .types import NoiseKeys, Verdict


@torch.no_grad()
def verify_coupled(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    *,
    keys: NoiseKeys,
    draft_lens: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    row_cutoffs: Tensor | None = None,
    backend: str = "auto",
) -> Verdict:
    """Accept drafted tokens while they equal the target's own samples (coupled verification).

    Every emitted token is the result of `sample(..., stream=Stream.RACE)` for the target logits, so
    the output does not depend on the draft. The acceptance rate is close to the optimum if the
    drafter also samples with stream RACE.

    Args:
        target_logits: [B, K+1, V], float16, bfloat16, float32 or float64, any strides.
        draft_token_ids: [B, K] int32 or int64.
        keys: [B] int64 each, at the position of the first drafted token. The stream is RACE, which
            ignores the round.
        draft_lens: [B] int32 or int64, number of valid drafted tokens; None means K for all rows.
        temperature: divides the target logits in float32; a float or [B], >= 0; 0 means greedy.
        row_cutoffs: [B, K+1], thresholds for the scaled target logits; smaller logits are masked.
        backend: "auto", "torch" or "triton".

    Returns:
        The verdict; `token_ids` [B, K+1] are padded with -1.

    Raises:
        ConfigError: the backend is unknown or the temperature is invalid.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: a tensor has the wrong shape, dtype or device.

    Source: Daliri et al., arXiv:2408.07978.
    """
    check_round(target_logits, draft_token_ids, draft_lens)
    warp = check_warp(target_logits, "B, K+1", Warp(temperature, row_cutoffs))
    check_keys(keys, target_logits)
    round_ = Round(target_logits, draft_token_ids, draft_lens)
    return operations(backend, target_logits.device).coupled(round_, warp, keys)
