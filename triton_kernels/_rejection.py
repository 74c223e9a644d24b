"""Rejection sampling on rows that are laws already: the coin of every position, and the law of the last token."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._rows import Probs, law_status, pick_rows, race, row_probs
from ._walk import Chain, End, find_end, make_verdict
from .noise import uniforms
from .types import NoiseKeys, Status, Stream, Verdict


def _at(rows: Tensor, token_ids: Tensor) -> Tensor:
    """Entries of `rows` [B, K, V] at `token_ids` [B, K], float32."""
    return rows.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).to(torch.float32)


class Draft(NamedTuple):
    """The proposal's laws."""

    logits: Tensor  # [B, K, V]
    logsumexp: Tensor  # [B, K] float32
    probs: Tensor | None  # [B, K, V] float32, where they were computed on the way

    def pick_probs(self, positions: Tensor) -> Tensor:
        """Probabilities [B, V] at `positions` [B], fresh memory; the same bits either way."""
        if self.probs is not None:
            return pick_rows(self.probs, positions)
        return pick_rows(self.logits, positions).softmax(-1, dtype=torch.float32)


def _make_draft(logits: Tensor, logsumexp: Tensor | None) -> Draft:
    if logsumexp is not None:
        return Draft(logits, logsumexp, None)
    probs, logsumexp = row_probs(logits.to(torch.float32))
    return Draft(logits, logsumexp, probs)


def _last_law(target: Probs, draft: Draft | None, chain: Chain, end: End) -> tuple[Tensor, Tensor]:
    """Weights [B, V] of the token after the accepted ones, and status [B] int32."""
    target_probs = pick_rows(target.probs, end.num_accepted)  # [B, V]
    status = law_status(target.logsumexp.gather(1, end.num_accepted.unsqueeze(-1)).squeeze(-1))
    if chain.token_ids.shape[1] == 0:
        return target_probs, status
    residual_rows = end.refused & ~end.bad_id
    last = end.last.unsqueeze(-1)
    if draft is None:
        residual = target_probs.scatter(1, chain.token_ids.gather(1, last), 0.0)
    else:
        draft_status = torch.where(residual_rows, law_status(draft.logsumexp.gather(1, last).squeeze(-1)), 0)
        residual_rows = residual_rows & (draft_status == 0)
        status = status | draft_status
        residual = draft.pick_probs(end.last).neg_().add_(target_probs).clamp_(min=0.0)
    empty = residual_rows & (residual.amax(-1) <= 0)
    torch.where((residual_rows & ~empty).unsqueeze(-1), residual, target_probs, out=target_probs)
    return target_probs, status | empty.to(torch.int32).mul_(int(Status.EMPTY_RESIDUAL))


def reject(
    law: Tensor, chain: Chain, draft_logits: Tensor | None, draft_logsumexp: Tensor | None, keys: NoiseKeys
) -> Verdict:
    """Decide one round.

    Args:
        law: [B, K+1, V] float32 logits of the target's laws.
        chain: what was drafted.
        draft_logits: [B, K, V] logits of the proposal's laws, or None for a point mass.
        draft_logsumexp: [B, K] float32, or None to compute it here.
        keys: [B] int64 each.
    """
    num_draft_tokens = chain.token_ids.shape[1]
    offsets = torch.arange(num_draft_tokens, device=law.device).unsqueeze(0)
    log_coins = uniforms(keys, Stream.ACCEPT, offsets, chain.token_ids).log_()  # [B, K]
    target = row_probs(law)
    target_logprobs = _at(law[:, :-1], chain.token_ids) - target.logsumexp[:, :-1]
    draft = None
    if draft_logits is None:
        accepted = log_coins < target_logprobs
    else:
        draft = _make_draft(draft_logits, draft_logsumexp)
        draft_logprobs = _at(draft_logits, chain.token_ids) - draft.logsumexp
        gain = target_logprobs - draft_logprobs
        accepted = (target_logprobs > -torch.inf) & ((target_logprobs >= draft_logprobs) | (log_coins < gain))
    end = find_end(chain, accepted)
    weights, status = _last_law(target, draft, chain, end)
    final_ids = race(weights, keys, Stream.CORRECTION, end.num_accepted)
    return make_verdict(chain, end, final_ids, status)
