"""The torch twin of rejection sampling, with what block verification shares."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Proposal, Round, Warp
from ..noise import uniforms
from ..types import NoiseKeys, Status, Stream, Verdict
from .greedy import greedy, with_greedy_rows
from .masses import exponentials_at, row_sums
from .pieces import Pieces
from .races import race
from .rows import PLAIN, law_status, logits_at, warp_at
from .walk import Chain, End, find_end, make_chain, make_verdict

# A plain number: torch.compile cannot follow the enum's conversion.
EMPTY_RESIDUAL = int(Status.EMPTY_RESIDUAL)


class Draft(NamedTuple):
    """The proposal's laws."""

    logits: Tensor  # [B, K, V]
    logsumexp: Tensor  # [B, K] float32


class Target(NamedTuple):
    """The target's laws."""

    logits: Tensor  # [B, K+1, V] raw
    warp: Warp
    logsumexp: Tensor  # [B, K+1] float32, of the warped rows
    pieces: Pieces  # of the logits, where the laws are


class LastLaw(NamedTuple):
    """The law of the token after the accepted ones."""

    weights: Tensor  # [P, S] float32, not normalised
    pieces: Pieces  # where those lie in [B, V]
    status: Tensor  # [B] int32


def _at(rows: Tensor, token_ids: Tensor) -> Tensor:
    """Entries of `rows` [B, K, V] at `token_ids` [B, K], float32."""
    return rows.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).to(torch.float32)


def make_draft(proposal: Proposal) -> Draft:
    """The proposal with its log-sum-exps."""
    if proposal.logsumexp is not None:
        return Draft(proposal.logits, proposal.logsumexp)
    return Draft(proposal.logits, row_sums(proposal.logits).logsumexp)


def acceptance_coins(chain: Chain, keys: NoiseKeys) -> Tensor:
    """One coin per position, [B, K] float32 in (0, 1)."""
    offsets = torch.arange(chain.token_ids.shape[1], device=chain.token_ids.device).unsqueeze(0)
    return uniforms(keys, Stream.ACCEPT, offsets, chain.token_ids)


def target_logprobs(target: Target, chain: Chain) -> Tensor:
    """Log-probabilities [B, K] of the drafted tokens under the target's laws."""
    return logits_at(target.logits[:, :-1], target.warp, chain.token_ids) - target.logsumexp[:, :-1]


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


def last_law(target: Target, draft: Draft | None, chain: Chain, end: End, ratios: Tensor | None = None) -> LastLaw:
    """The law of the token after the accepted ones.

    Args:
        target: the target's laws.
        draft: the proposal's laws; None for a point mass.
        chain: what was drafted.
        end: where each row's chain ends.
        ratios: [B] float32 in (0, 1], by which the target's law is scaled before the draft's is taken off; None: 1.
    """
    here = end.num_accepted
    pieces = target.pieces.at(here)
    logsumexp = target.logsumexp.gather(1, here.unsqueeze(-1)).squeeze(-1)
    probs = exponentials_at(pieces, pieces.of_row(target.logits, here), warp_at(target.warp, here), logsumexp)  # [P, S]
    status = law_status(logsumexp)
    if chain.token_ids.shape[1] == 0:
        return LastLaw(probs, pieces, status)
    residual_rows = end.refused
    last = end.last.unsqueeze(-1)
    if draft is None:
        last_ids = pieces.spread(chain.token_ids.gather(1, last).squeeze(-1)).to(torch.int32).unsqueeze(-1)
        residual = torch.ne(pieces.token_ids(probs.device), last_ids, out=torch.empty_like(probs)).mul_(probs)
    else:
        draft_logsumexp = draft.logsumexp.gather(1, last).squeeze(-1)
        draft_status = torch.where(residual_rows, law_status(draft_logsumexp), 0)
        residual_rows = residual_rows & (draft_status == 0)
        status = status | draft_status
        residual = exponentials_at(pieces, pieces.of_row(draft.logits, end.last), PLAIN, draft_logsumexp).neg_()
        scaled = probs if ratios is None else probs * pieces.spread(ratios).unsqueeze(-1)
        residual = residual.add_(scaled).clamp_(min=0.0)
    empty = residual_rows & (pieces.collect(residual.amax(-1)).amax(-1) <= 0)
    torch.where(pieces.spread(residual_rows & ~empty).unsqueeze(-1), residual, probs, out=probs)
    return LastLaw(probs, pieces, torch.add(status, empty, alpha=EMPTY_RESIDUAL))


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
    # Only the sums are kept, and the last row is weighed again: writing all rows costs more.
    target = Target(round_.target_logits, warp, *row_sums(round_.target_logits, warp))
    accepted = _accept(target_logprobs(target, chain), draft, chain, keys)
    end = find_end(chain, accepted)
    law = last_law(target, draft, chain, end)
    final_ids = race(law.weights, law.pieces, keys, Stream.CORRECTION, end.num_accepted)
    return make_verdict(chain, end, final_ids, law.status), accepted
