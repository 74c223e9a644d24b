"""Greedy verification."""

import torch
from torch import Tensor

from ._checks import check_round
from ._inputs import Round
from .backends import operations
from .types import Verdict


@torch.no_grad()
def verify_greedy(
    target_logits: Tensor, draft_token_ids: Tensor, *, draft_lens: Tensor | None = None, backend: str = "auto"
) -> Verdict:
    """Keep drafted tokens while each is the target's argmax (ties: the lowest index), then emit that argmax.

    Args:
        target_logits: [B, K+1, V], float16, bfloat16, float32 or float64, any strides.
        draft_token_ids: [B, K] int32 or int64.
        draft_lens: [B] int32 or int64, how many drafted tokens count; None: all.
        backend: "auto", "torch" or "triton".

    Returns:
        The verdict, [B, K+1] ids padded with -1.

    Raises:
        ConfigError: an unknown backend.
        KernelUnavailableError: backend="triton" where it cannot run.
        ShapeError: a shape, dtype or device that does not fit.
    """
    check_round(target_logits, draft_token_ids, draft_lens)
    return operations(backend, target_logits.device).greedy(Round(target_logits, draft_token_ids, draft_lens))
