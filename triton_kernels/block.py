"""Block verification."""

import torch
from torch import Tensor

from ._checks import check_keys, check_proposal, check_round, check_warp
from ._inputs import Round, Warp
from .backends import operations
from .types import NoiseKeys, Verdict


@torch.no_grad()
def verify_block(
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
    """Keep the longest prefix that a joint test of its tokens allows: the target's law, in fewer rounds.

    On average it keeps at least as many tokens as `verify_rejection`, and the emitted tokens follow the target's law.
    Where nothing can be gained (a point mass, one drafted token) it is `verify_rejection`. A round's keys must not
    come again: with noise that leaves the round out, tokens that were refused once are refused again.

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

    Source: Sun et al., arXiv:2403.10444, algorithm 2.
    """
    check_round(target_logits, draft_token_ids, draft_lens)
    proposal = check_proposal(target_logits, draft_logits, draft_logsumexp)
    warp = check_warp(target_logits, "B, K+1", Warp(temperature, row_cutoffs))
    check_keys(keys, target_logits)
    round_ = Round(target_logits, draft_token_ids, draft_lens)
    chosen = operations(backend, target_logits.device)
    if proposal is None:
        return chosen.reject(round_, warp, None, keys)
    return chosen.block(round_, warp, proposal, keys)
