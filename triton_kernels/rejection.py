"""Rejection sampling."""

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
    """Keep drafted tokens with probability min(1, target / draft), so that the emitted tokens follow the target's law.

    At the first refusal the next token is drawn from the positive part of target minus draft, after the last
    accepted token from the bonus row. Where that positive part is empty, the drafted id is not in [0, V), or the
    draft's row has no law, the token is drawn from the target's row.

    Args:
        target_logits: [B, K+1, V], float16, bfloat16, float32 or float64, any strides.
        draft_token_ids: [B, K] int32 or int64, drawn from `draft_logits`.
        draft_logits: [B, K, V], final: neither temperature nor cutoffs act on them. None: each token was proposed
            with certainty (a point mass).
        keys: [B] int64 each; `positions` is that of the first drafted token. Streams ACCEPT and CORRECTION.
        draft_lens: [B] int32 or int64, how many drafted tokens count; None: all.
        temperature: divides the target's logits in float32; a float or [B], >= 0. 0 decides as `verify_greedy`.
        row_cutoffs: [B, K+1], after the temperature; the target's entries below are dropped.
        draft_logsumexp: [B, K] float32, as `sample` gave it; saves a pass over `draft_logits`, changes nothing.
        backend: "auto", "torch" or "triton".

    Returns:
        The verdict, [B, K+1] ids padded with -1.

    Raises:
        ConfigError: an unknown backend, a bad temperature, or `draft_logsumexp` without `draft_logits`.
        KernelUnavailableError: backend="triton" where it cannot run.
        ShapeError: a shape, dtype or device that does not fit.

    Source: Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318, algorithm 2.
    """
    check_round(target_logits, draft_token_ids, draft_lens)
    proposal = check_proposal(target_logits, draft_logits, draft_logsumexp)
    warp = check_warp(target_logits, "B, K+1", Warp(temperature, row_cutoffs))
    check_keys(keys, target_logits)
    round_ = Round(target_logits, draft_token_ids, draft_lens)
    return operations(backend, target_logits.device).reject(round_, warp, proposal, keys)
