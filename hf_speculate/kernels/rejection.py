"""Verification by rejection sampling."""

import torch
from torch import Tensor

from ._checks import check_keys, check_proposal, check_round, check_warp
from ._inputs import Round, Warp
from .backends import operations
from .types import NoiseKeys, Verdict


@torch.no_grad()
def verify_rejection(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_logits: Tensor | None = None,
    *,
    keys: NoiseKeys,
    draft_lens: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    row_cutoffs: Tensor | None = None,
    draft_logsumexp: Tensor | None = None,
    backend: str = "auto",
) -> Verdict:
    """Accept a drafted token x with probability min(1, p(x) / q(x)) (rejection sampling).

    Here p is the target distribution and q the draft distribution. The emitted tokens follow the
    target distribution. The token at the first rejection is sampled from the residual max(p - q,
    0), and the bonus token from p. If the residual is zero, the drafted id is not in [0, V), or the
    draft row is not a valid distribution, the token at the rejection is also sampled from p.

    Args:
        target_logits: [B, K+1, V], float16, bfloat16, float32 or float64, any strides.
        draft_token_ids: [B, K] int32 or int64, sampled from `draft_logits`.
        draft_logits: [B, K, V], with temperature and cutoffs already applied. None for a
            deterministic draft (point mass).
        keys: [B] int64 each, at the position of the first drafted token. The streams are ACCEPT and
            CORRECTION.
        draft_lens: [B] int32 or int64, number of valid drafted tokens; None means K for all rows.
        temperature: divides the target logits in float32; a float or [B], >= 0; 0 means greedy.
        row_cutoffs: [B, K+1], thresholds for the scaled target logits; smaller logits are masked.
        draft_logsumexp: [B, K] float32, as returned by `sample`; saves a pass over `draft_logits`.
        backend: "auto", "torch" or "triton".

    Returns:
        The verdict; `token_ids` [B, K+1] are padded with -1.

    Raises:
        ConfigError: the backend is unknown, the temperature is invalid, or `draft_logsumexp` is
            given without `draft_logits`.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: a tensor has the wrong shape, dtype or device.

    Source: Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318,
    algorithm 2.
    """
    check_round(target_logits, draft_token_ids, draft_lens)
    proposal = check_proposal(target_logits, draft_logits, draft_logsumexp)
    warp = check_warp(target_logits, "B, K+1", Warp(temperature, row_cutoffs))
    check_keys(keys, target_logits)
    round_ = Round(target_logits, draft_token_ids, draft_lens)
    return operations(backend, target_logits.device).reject(round_, warp, proposal, keys)
