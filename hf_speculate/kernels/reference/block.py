"""Torch reference of block verification.

With target distributions p, draft distributions q, drafted tokens x_1 .. x_K and rho_0 = 1:

    rho_i  = min(rho_{i-1} * p(x_i) / q(x_i), 1)
    mass_i = sum over x of max(rho_i * p(x) - q(x), 0), with p and q after x_1 .. x_i
    h_i    = mass_i / (mass_i + 1 - rho_i) for i < K, and h_K = rho_K

Position i passes if its uniform random number u_i is below h_i. The longest prefix whose last
position passes is accepted. If s is the cumulative sum of the log ratios, then log rho_i = s_i -
max(0, s_1, .., s_i), so the recursion needs no loop. The draft ends before the first id outside [0,
V) and before the first row without a valid distribution.
"""

import torch
from torch import Tensor

from .._inputs import Proposal, Round, Warp
from ..types import NoiseKeys, Stream, Verdict
from .chain import end_at, make_chain, make_verdict
from .greedy import greedy, with_greedy_rows
from .masses import Masses, row_masses
from .pieces import kept_pieces
from .races import race
from .rejection import (
    Draft,
    Target,
    acceptance_uniforms,
    draft_logprobs,
    final_distribution,
    make_draft,
    reject,
    target_logprobs,
)
from .rows import chunks, padded_like, row_sum

# Replaces a log ratio of +inf. A float64 sum of 128 such ratios keeps twelve digits, and other
# ratios cannot undo it.
MAX_LOG_RATIO = 1e4


def _log_ratios(target_of_token: Tensor, draft_of_token: Tensor) -> Tensor:
    """Compute log rho_1 .. log rho_K, [B, K] float64 <= 0.

    Both arguments are log-probabilities [B, K] of the drafted tokens.
    """
    gains = (target_of_token.double() - draft_of_token.double()).clamp_(max=MAX_LOG_RATIO)
    sums = gains.masked_fill_(target_of_token == -torch.inf, -torch.inf).cumsum(-1)
    return sums - sums.cummax(-1).values.clamp_(min=0.0)


def _residual_masses(target: Masses, draft: Draft, ratios: Tensor) -> Tensor:
    """Compute mass_1 .. mass_{K-1}, [B, K-1] float32, from rho_1 .. rho_{K-1} [B, K-1] float32."""
    parts = []
    for chunk in chunks(draft.logits[:, 1:]):
        draft_rows = row_masses(draft.logits[chunk, 1:])
        rows = padded_like(draft_rows.masses)
        residuals = rows[..., : draft.logits.shape[-1]]
        torch.div(target.masses[chunk, 1:-1], target.sums[chunk, 1:-1].unsqueeze(-1), out=residuals)
        residuals.mul_(ratios[chunk].unsqueeze(-1))
        residuals.sub_(draft_rows.masses.div_(draft_rows.sums.unsqueeze(-1))).clamp_(min=0.0)
        parts.append(row_sum(rows))
    return torch.cat(parts)


def block(round_: Round, warp: Warp, proposal: Proposal, keys: NoiseKeys) -> Verdict:
    """See `verify_block`."""
    num_draft_tokens = round_.draft_token_ids.shape[1]
    if num_draft_tokens < 2:
        return reject(round_, warp, proposal, keys)  # the same for a block of one token
    if warp.is_greedy:
        return greedy(round_)
    chain = make_chain(round_)
    masses = row_masses(round_.target_logits, warp)
    target = Target(
        round_.target_logits, warp, masses.logsumexp, kept_pieces(round_.target_logits, warp)[0]
    )
    draft = make_draft(proposal)
    is_valid = (target.logsumexp[:, :-1].abs() < torch.inf) & (draft.logsumexp.abs() < torch.inf)
    # [B, 1]
    lens = (chain.acceptable & is_valid).cumprod(-1, dtype=torch.int64).sum(-1, keepdim=True)
    log_ratios = _log_ratios(target_logprobs(target, chain), draft_logprobs(draft, chain))
    ratios = log_ratios.exp().to(torch.float32)  # [B, K]
    residual_masses = _residual_masses(masses, draft, ratios[:, :-1])
    u = acceptance_uniforms(chain, keys)
    passed = u < ratios
    one_minus_rho = log_ratios[:, :-1].expm1().neg_().to(torch.float32)
    # u < h without a division
    inner = u[:, :-1] * (residual_masses + one_minus_rho) < residual_masses
    counts = torch.arange(1, num_draft_tokens + 1, device=chain.token_ids.device)
    passed[:, :-1] = torch.where(counts[:-1] < lens, inner, passed[:, :-1])
    passed |= log_ratios >= 0
    num_accepted = (counts * (passed & (counts <= lens))).amax(-1)  # [B]
    end = end_at(chain, num_accepted)
    kept_ratios = torch.where(
        num_accepted > 0, ratios.gather(1, (num_accepted - 1).clamp_(min=0)[:, None])[:, 0], 1.0
    )
    final = final_distribution(target, draft, chain, end, kept_ratios)
    final_ids = race(final.weights, final.pieces, keys, Stream.CORRECTION, num_accepted)
    return with_greedy_rows(round_, warp, make_verdict(chain, end, final_ids, final.status))
