"""Greedy verification."""

import torch
from torch import Tensor

from ._checks import check_round
from ._inputs import Round
from .backends import operations
from .types import Verdict


@torch.no_grad()
def verify_greedy(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    *,
    draft_lens: Tensor | None = None,
    backend: str = "auto",
) -> Verdict:
    """Accept drafted tokens while they equal the target's argmax, then emit the argmax.

    Ties go to the lowest index.

    Args:
        target_logits: [B, K+1, V], float16, bfloat16, float32 or float64, any strides.
        draft_token_ids: [B, K] int32 or int64.
        draft_lens: [B] int32 or int64, number of valid drafted tokens; None means K for all rows.
        backend: "auto", "torch" or "triton".

    Returns:
        The verdict; `token_ids` [B, K+1] are padded with -1.

    Raises:
        ConfigError: the backend is unknown.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: a tensor has the wrong shape, dtype or device.
    """
    check_round(target_logits, draft_token_ids, draft_lens)
    return operations(backend, target_logits.device).greedy(
        Round(target_logits, draft_token_ids, draft_lens)
    )
