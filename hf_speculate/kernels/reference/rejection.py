"""Torch reference of rejection sampling, with helpers shared by block verification."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Proposal, Round, Warp
from ..noise import uniforms
from ..types import NoiseKeys, Status, Stream, Verdict
from .chain import Chain, End, find_end, make_chain, make_verdict
from .greedy import greedy, with_greedy_rows
from .masses import piece_masses, row_sums
from .pieces import Pieces
from .races import race
from .rows import PLAIN, logits_at, row_status, warp_at

# A Python number, because torch.compile cannot trace the conversion of an enum.
EMPTY_RESIDUAL = int(Status.EMPTY_RESIDUAL)


class Draft(NamedTuple):
    """Draft distributions."""

    logits: Tensor  # [B, K, V]
    logsumexp: Tensor  # [B, K] float32


class Target(NamedTuple):
    """Target distributions."""

    logits: Tensor  # [B, K+1, V] raw
    warp: Warp
    logsumexp: Tensor  # [B, K+1] float32, after temperature and cutoffs
    pieces: Pieces  # pieces of the logits with nonzero probability


class FinalDistribution(NamedTuple):
    """Distribution of the correction or bonus token."""

    weights: Tensor  # [P, S] float32, unnormalised probabilities
    pieces: Pieces  # positions of the weights in [B, V]
    status: Tensor  # [B] int32, `Status` flags


def make_draft(proposal: Proposal) -> Draft:
    """Compute the log-sum-exps of the proposal if it has none."""
    if proposal.logsumexp is not None:
        return Draft(proposal.logits, proposal.logsumexp)
    return Draft(proposal.logits, row_sums(proposal.logits).logsumexp)


def acceptance_uniforms(chain: Chain, keys: NoiseKeys) -> Tensor:
    """Return uniform random numbers for the acceptance tests, [B, K] float32 in (0, 1)."""
    offsets = torch.arange(chain.token_ids.shape[1], device=chain.token_ids.device).unsqueeze(0)
    return uniforms(keys, Stream.ACCEPT, offsets, chain.token_ids)


def target_logprobs(target: Target, chain: Chain) -> Tensor:
    """Compute log-probabilities [B, K] of the drafted tokens under the target distributions."""
    return logits_at(target.logits[:, :-1], target.warp, chain.token_ids) - target.logsumexp[:, :-1]


def draft_logprobs(draft: Draft, chain: Chain) -> Tensor:
    """Compute log-probabilities [B, K] of the drafted tokens under the draft distributions."""
    logits = draft.logits.gather(-1, chain.token_ids.unsqueeze(-1)).squeeze(-1).to(torch.float32)
    return logits - draft.logsumexp


def _accept(target_of_token: Tensor, draft: Draft | None, chain: Chain, keys: NoiseKeys) -> Tensor:
    """Test every position by itself, [B, K] bool; False for an invalid row."""
    log_u = acceptance_uniforms(chain, keys).log_()  # [B, K]
    if draft is None:
        return log_u < target_of_token
    draft_of_token = draft_logprobs(draft, chain)
    # A +inf in a draft row gives its other tokens a log-probability of -inf, so all of them would
    # be accepted.
    possible = (target_of_token > -torch.inf) & (draft.logsumexp.abs() < torch.inf)
    return possible & (
        (target_of_token >= draft_of_token) | (log_u < target_of_token - draft_of_token)
    )


def final_distribution(
    target: Target, draft: Draft | None, chain: Chain, end: End, ratios: Tensor | None = None
) -> FinalDistribution:
    """Compute the residual max(ratio * p - q, 0), or p, for the correction or bonus token.

    Args:
        target: target distributions p.
        draft: draft distributions q; None for a point mass.
        chain: the drafted tokens.
        end: the first rejected position of each row.
        ratios: [B] float32 in (0, 1]; None means 1.
    """
    here = end.num_accepted
    pieces = target.pieces.select(here)
    logsumexp = target.logsumexp.gather(1, here.unsqueeze(-1)).squeeze(-1)
    # [P, S]
    probs = piece_masses(
        pieces, pieces.gather_at(target.logits, here), warp_at(target.warp, here), logsumexp
    )
    if chain.token_ids.shape[1] == 0:
        return FinalDistribution(probs, pieces, row_status(logsumexp))
    residual_rows = end.rejected
    last = end.last.unsqueeze(-1)
    if draft is None:
        status = row_status(logsumexp)
        last_ids = (
            pieces.expand(chain.token_ids.gather(1, last).squeeze(-1)).to(torch.int32).unsqueeze(-1)
        )
        residual = torch.ne(
            pieces.token_ids(probs.device), last_ids, out=torch.empty_like(probs)
        ).mul_(probs)
    else:
        draft_logsumexp = draft.logsumexp.gather(1, last).squeeze(-1)
        status, draft_status = row_status(torch.stack((logsumexp, draft_logsumexp))).unbind()
        draft_status = draft_status * residual_rows
        residual_rows = residual_rows & (draft_status == 0)
        status = status | draft_status
        draft_probs = piece_masses(
            pieces, pieces.gather_at(draft.logits, end.last), PLAIN, draft_logsumexp
        )
        scaled = probs if ratios is None else probs * pieces.expand(ratios).unsqueeze(-1)
        residual = torch.sub(scaled, draft_probs, out=draft_probs).clamp_(min=0.0)
    empty = residual_rows & (pieces.row_max(residual) <= 0)
    torch.where(pieces.expand(residual_rows ^ empty).unsqueeze(-1), residual, probs, out=probs)
    return FinalDistribution(probs, pieces, torch.add(status, empty, alpha=EMPTY_RESIDUAL))


def reject(round_: Round, warp: Warp, proposal: Proposal | None, keys: NoiseKeys) -> Verdict:
    """See `verify_rejection`."""
    if warp.is_greedy:
        return greedy(round_)
    # With K = 0, most of the other operators would run on empty tensors.
    if round_.target_logits.shape[1] == 1:
        verdict = _sample_without_draft(round_.target_logits[:, 0], warp, keys)
    else:
        verdict, _ = _reject(make_chain(round_), round_, warp, proposal, keys)
    return with_greedy_rows(round_, warp, verdict)


def _sample_without_draft(logits: Tensor, warp: Warp, keys: NoiseKeys) -> Verdict:
    """Compute the verdict for K = 0 from logits [B, V]; bitwise equal to `_reject`."""
    with torch.inference_mode():
        if warp.row_cutoffs is not None:
            warp = Warp(warp.temperature, warp.row_cutoffs.squeeze(1))
        logsumexp, pieces = row_sums(logits, warp)
        probs = piece_masses(pieces, pieces.gather(logits), warp, logsumexp)  # [P, S]
        final_ids = race(probs, pieces, keys, Stream.CORRECTION, torch.zeros_like(keys.positions))
    return Verdict(
        final_ids.clone().unsqueeze(-1),
        torch.zeros_like(keys.seeds, dtype=torch.int32),
        row_status(logsumexp),
    )


def reject_and_test(round_: Round, proposal: Proposal, keys: NoiseKeys) -> tuple[Verdict, Tensor]:
    """See `Operations.reject_and_test`."""
    chain = make_chain(round_)
    verdict, accepted = _reject(chain, round_, PLAIN, proposal, keys)
    return verdict, accepted & chain.acceptable


def _reject(
    chain: Chain, round_: Round, warp: Warp, proposal: Proposal | None, keys: NoiseKeys
) -> tuple[Verdict, Tensor]:
    """Return the verdict, and the separate acceptance test of every position, [B, K] bool."""
    # Inference mode makes rounds of many small operations about 12 % faster. Results are created
    # outside it.
    with torch.inference_mode():
        draft = None if proposal is None else make_draft(proposal)
        # Only log-sum-exps are kept. Recomputing the final row is cheaper than writing the
        # probabilities of all rows.
        target = Target(round_.target_logits, warp, *row_sums(round_.target_logits, warp))
        accepted = _accept(target_logprobs(target, chain), draft, chain, keys)
        end = find_end(chain, accepted)
        final = final_distribution(target, draft, chain, end)
        final_ids = race(final.weights, final.pieces, keys, Stream.CORRECTION, end.num_accepted)
    return make_verdict(chain, end, final_ids, final.status), accepted
