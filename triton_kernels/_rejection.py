"""Rejection sampling on rows that are laws already: the coin of every position, and the law of the last token."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._rows import Masses, law_status, pick_rows, race, row_masses
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


def _accept(law: Tensor, target: Masses, draft: Draft | None, chain: Chain, keys: NoiseKeys) -> Tensor:
    """Throw every position's coin: [B, K] bool, False where a row has no law."""
    offsets = torch.arange(chain.token_ids.shape[1], device=law.device).unsqueeze(0)
    log_coins = uniforms(keys, Stream.ACCEPT, offsets, chain.token_ids).log_()  # [B, K]
    target_logprobs = _at(law[:, :-1], chain.token_ids) - target.logsumexp[:, :-1]
    if draft is None:
        return log_coins < target_logprobs
    draft_logprobs = _at(draft.logits, chain.token_ids) - draft.logsumexp
    gain = target_logprobs - draft_logprobs
    # A +inf elsewhere in the draft's row reads as "never proposed" here, which would keep every token.
    possible = (target_logprobs > -torch.inf) & (draft.logsumexp.abs() < torch.inf)
    return possible & ((target_logprobs >= draft_logprobs) | (log_coins < gain))


def _last_law(target: Masses, draft: Draft | None, chain: Chain, end: End) -> tuple[Tensor, Tensor]:
    """Weights [B, V] of the token after the accepted ones, and status [B] int32."""
    here = end.num_accepted.unsqueeze(-1)
    target_probs = pick_rows(target.masses, end.num_accepted).div_(target.sums.gather(1, here))  # [B, V]
    status = law_status(target.logsumexp.gather(1, here).squeeze(-1))
    if chain.token_ids.shape[1] == 0:
        return target_probs, status
    residual_rows = end.refused
    last = end.last.unsqueeze(-1)
    if draft is None:
        residual = target_probs.scatter(1, chain.token_ids.gather(1, last), 0.0)
    else:
        draft_status = torch.where(residual_rows, law_status(draft.logsumexp.gather(1, last).squeeze(-1)), 0)
        residual_rows = residual_rows & (draft_status == 0)
        status = status | draft_status
        draft_masses, draft_sums, _ = row_masses(pick_rows(draft.logits, end.last).to(torch.float32))
        residual = draft_masses.div_(draft_sums.unsqueeze(-1)).neg_().add_(target_probs).clamp_(min=0.0)
    empty = residual_rows & (residual.amax(-1) <= 0)
    torch.where((residual_rows & ~empty).unsqueeze(-1), residual, target_probs, out=target_probs)
    return target_probs, torch.add(status, empty, alpha=int(Status.EMPTY_RESIDUAL))


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
    draft = None
    if draft_logits is not None:
        # Only the sums are kept: the masses of all rows would double the memory to save one row's exponentials.
        draft_lse = row_masses(draft_logits.to(torch.float32)).logsumexp if draft_logsumexp is None else draft_logsumexp
        draft = Draft(draft_logits, draft_lse)
    target = row_masses(law)
    end = find_end(chain, _accept(law, target, draft, chain, keys))
    weights, status = _last_law(target, draft, chain, end)
    del target
    final_ids = race(weights, keys, Stream.CORRECTION, end.num_accepted)
    return make_verdict(chain, end, final_ids, status)
