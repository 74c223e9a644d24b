"""The torch twin of rejection sampling, with what block verification shares."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Proposal, Round, Warp
from ..noise import uniforms
from ..types import NoiseKeys, Status, Stream, Verdict
from .greedy import greedy, with_greedy_rows
from .rows import PLAIN, Masses, law_status, logits_at, pick_rows, race, row_logsumexp, row_masses
from .walk import Chain, End, find_end, make_chain, make_verdict


class Draft(NamedTuple):
    """The proposal's laws."""

    logits: Tensor  # [B, K, V]
    logsumexp: Tensor  # [B, K] float32


class TokenLogprobs(NamedTuple):
    """What the two laws say of the drafted tokens."""

    target: Tensor  # [B, K] float32
    draft: Tensor  # [B, K] float32; +inf, -inf or NaN where the draft's row has no law


def _at(rows: Tensor, token_ids: Tensor) -> Tensor:
    """Entries of `rows` [B, K, V] at `token_ids` [B, K], float32."""
    return rows.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).to(torch.float32)


def make_draft(proposal: Proposal) -> Draft:
    """The proposal with its log-sum-exps."""
    if proposal.logsumexp is not None:
        return Draft(proposal.logits, proposal.logsumexp)
    # Only the sums are kept: the masses of all rows would double the memory to save one row's exponentials.
    return Draft(proposal.logits, row_logsumexp(proposal.logits))


def acceptance_coins(chain: Chain, keys: NoiseKeys) -> Tensor:
    """One coin per position, [B, K] float32 in (0, 1)."""
    offsets = torch.arange(chain.token_ids.shape[1], device=chain.token_ids.device).unsqueeze(0)
    return uniforms(keys, Stream.ACCEPT, offsets, chain.token_ids)


def target_logprobs(round_: Round, warp: Warp, target: Masses, chain: Chain) -> Tensor:
    """Log-probabilities [B, K] of the drafted tokens under the target's law."""
    return logits_at(round_.target_logits[:, :-1], warp, chain.token_ids) - target.logsumexp[:, :-1]


def draft_logprobs(draft: Draft, chain: Chain) -> Tensor:
    """Log-probabilities [B, K] of the drafted tokens under the proposal."""
    return _at(draft.logits, chain.token_ids) - draft.logsumexp


def _accept(target_of_token: Tensor, draft: Draft | None, chain: Chain, keys: NoiseKeys) -> Tensor:
    """Throw every position's coin: [B, K] bool, False where a row has no law."""
    log_coins = acceptance_coins(chain, keys).log_()  # [B, K]
    if draft is None:
        return log_coins < target_of_token
    draft_of_token = draft_logprobs(draft, chain)
    # A +inf elsewhere in the draft's row reads as "never proposed" here, which would keep every token.
    possible = (target_of_token > -torch.inf) & (draft.logsumexp.abs() < torch.inf)
    return possible & ((target_of_token >= draft_of_token) | (log_coins < target_of_token - draft_of_token))


def last_law(
    target: Masses, draft: Draft | None, chain: Chain, end: End, ratios: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights [B, V] of the token after the accepted ones, and status [B] int32.

    Args:
        target: of all K+1 rows.
        draft: the proposal's laws; None for a point mass.
        chain: what was drafted.
        end: where each row's chain ends.
        ratios: [B] float32 in (0, 1], by which the target's law is scaled before the draft's is taken off; None: 1.
    """
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
        draft_masses, draft_sums, _ = row_masses(pick_rows(draft.logits, end.last))
        residual = draft_masses.div_(draft_sums.unsqueeze(-1)).neg_()
        scaled = target_probs if ratios is None else target_probs * ratios.unsqueeze(-1)
        residual = residual.add_(scaled).clamp_(min=0.0)
    empty = residual_rows & (residual.amax(-1) <= 0)
    torch.where((residual_rows & ~empty).unsqueeze(-1), residual, target_probs, out=target_probs)
    return target_probs, torch.add(status, empty, alpha=int(Status.EMPTY_RESIDUAL))


def reject(round_: Round, warp: Warp, proposal: Proposal | None, keys: NoiseKeys) -> Verdict:
    """See `verify_rejection`."""
    if warp.is_greedy:
        return greedy(round_)
    verdict, _ = _reject(make_chain(round_), round_, warp, proposal, keys)
    return with_greedy_rows(round_, warp, verdict)


def reject_and_test(round_: Round, proposal: Proposal, keys: NoiseKeys) -> tuple[Verdict, Tensor]:
    """See `Operations.reject_and_test`."""
    chain = make_chain(round_)
    verdict, accepted = _reject(chain, round_, PLAIN, proposal, keys)
    return verdict, accepted & chain.acceptable


def _reject(
    chain: Chain, round_: Round, warp: Warp, proposal: Proposal | None, keys: NoiseKeys
) -> tuple[Verdict, Tensor]:
    """The verdict on the round, and every position's own test [B, K] bool."""
    draft = None if proposal is None else make_draft(proposal)
    target = row_masses(round_.target_logits, warp)
    accepted = _accept(target_logprobs(round_, warp, target, chain), draft, chain, keys)
    end = find_end(chain, accepted)
    weights, status = last_law(target, draft, chain, end)
    del target
    final_ids = race(weights, keys, Stream.CORRECTION, end.num_accepted)
    return make_verdict(chain, end, final_ids, status), accepted
