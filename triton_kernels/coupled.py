"""Coupled verification."""

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
    """Keep drafted tokens while each is the one that the target draws itself with the noise of its position.

    Every emitted token is `sample(..., stream=Stream.RACE)` of the target's own law, so the text does not depend on
    the drafts. A drafter that draws with stream RACE too proposes the same token with almost the best possible chance.

    Args:
        target_logits: [B, K+1, V], float16, bfloat16, float32 or float64, any strides.
        draft_token_ids: [B, K] int32 or int64.
        keys: [B] int64 each; `positions` is that of the first drafted token. Stream RACE, which leaves out the round.
        draft_lens: [B] int32 or int64, how many drafted tokens count; None: all.
        temperature: divides the target's logits in float32; a float or [B], >= 0. 0 decides as `verify_greedy`.
        row_cutoffs: [B, K+1], after the temperature; the target's entries below are dropped.
        backend: "auto", "torch" or "triton".

    Returns:
        The verdict, [B, K+1] ids padded with -1.

    Raises:
        ConfigError: an unknown backend or a bad temperature.
        KernelUnavailableError: backend="triton" where it cannot run.
        ShapeError: a shape, dtype or device that does not fit.

    Source: Daliri et al., arXiv:2408.07978.
    """
    check_round(target_logits, draft_token_ids, draft_lens)
    warp = check_warp(target_logits, "B, K+1", Warp(temperature, row_cutoffs))
    check_keys(keys, target_logits)
    round_ = Round(target_logits, draft_token_ids, draft_lens)
    return operations(backend, target_logits.device).coupled(round_, warp, keys)
