"""Prefix verdicts: verdicts for rules that decide about every position independently."""

import torch
from torch import Tensor

from hf_speculate.types import DraftOut, Status, Verdict


@torch.no_grad()
def keep_prefix(
    target_logits: Tensor, draft: DraftOut, accepted: Tensor, next_token_ids: Tensor
) -> Verdict:
    """Keep each row's drafted tokens before the first rejected token, and append one token.

    Regardless of `accepted`, a drafted token is rejected if it lies past `draft.lens`, its id is
    outside [0, V), its target probability is 0, or the logits at its position do not define a
    distribution.

    Args:
        target_logits: [B, K+1, V], processed logits of any floating-point dtype.
        draft: the drafted tokens.
        accepted: [B, K] bool, the decision at each position.
        next_token_ids: [B, K+1] int64. Entry i is appended after i accepted tokens.

    Returns:
        The verdict: [B, K+1] ids padded with -1, and the status of the logits at the last token.
    """
    num_drafted, vocab_size = draft.token_ids.shape[1], target_logits.shape[-1]
    last_id = vocab_size - 1
    safe_ids = draft.token_ids.clamp(0, last_id)  # [B, K]
    is_valid_id = safe_ids == draft.token_ids
    max_logits = target_logits.amax(-1)  # [B, K+1], NaN if any logit is NaN
    drafted_logits = target_logits[:, :-1].gather(-1, safe_ids[..., None])[..., 0]  # [B, K]
    columns = torch.arange(num_drafted + 1, device=target_logits.device)
    is_drafted = columns[:-1] < draft.lens[:, None]
    is_kept = (
        accepted
        & is_drafted
        & is_valid_id
        & max_logits[:, :-1].isfinite()
        & (drafted_logits > -torch.inf)
    )
    num_accepted = is_kept.long().cumprod(dim=1).sum(dim=1)  # [B]
    next_column = num_accepted[:, None]
    next_ids = next_token_ids.gather(1, next_column).clamp(0, last_id)  # [B, 1]
    token_ids = torch.cat([safe_ids, next_ids], dim=1).scatter(1, next_column, next_ids)  # [B, K+1]
    has_bad_id = (is_drafted & ~is_valid_id & (columns[:-1] == next_column)).any(dim=1)
    max_logit = max_logits.gather(1, next_column)[:, 0]
    status_flags = (
        (Status.BAD_DRAFT_ID, has_bad_id),
        (Status.NAN, max_logit.isnan()),
        (Status.ALL_MASKED, max_logit.isneginf()),
        (Status.POSITIVE_INF, max_logit.isposinf()),
    )
    status = torch.zeros_like(num_accepted, dtype=torch.int32)
    for flag, is_set in status_flags:
        status |= int(flag) * is_set
    return Verdict(
        token_ids.masked_fill(columns > next_column, -1), num_accepted.to(torch.int32), status
    )
