"""Peers' signatures for one sequence, on the twins."""

import torch
from torch import Tensor

from ._checks import FLOAT_DTYPES, ID_DTYPES, check_dtype, check_logits, check_shape
from .reference import verify_greedy, verify_rejection
from .types import NoiseKeys, Verdict


def _check_candidates(target_dists: Tensor, candidate_tokens: Tensor) -> None:
    check_logits("target_dists", target_dists, "K+1, V")
    check_shape("candidate_tokens", candidate_tokens, "K", (target_dists.shape[0] - 1,))
    check_dtype("candidate_tokens", candidate_tokens, ID_DTYPES)


def _end_of(verdict: Verdict) -> tuple[Tensor, Tensor]:
    """Index of the first refusal and the token there, of a batch of one."""
    rejected_idx = verdict.num_accepted.to(torch.int64)
    return rejected_idx[0], verdict.token_ids[0].gather(0, rejected_idx)[0]


def greedy_match(target_dists: Tensor, candidate_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compare candidates with the target's most probable tokens (ties: the lowest index).

    Args:
        target_dists: [K+1, V] probabilities, any float dtype; only their order matters.
        candidate_tokens: [K] int32 or int64.

    Returns:
        `rejected_idx`, the first position that differs (K when none does), and the target's most probable token
        there; both 0-dim int64.

    Raises:
        ShapeError: a shape or dtype that does not fit.
    """
    _check_candidates(target_dists, candidate_tokens)
    return _end_of(verify_greedy(target_dists.unsqueeze(0), candidate_tokens.unsqueeze(0)))


def speculative_sampling(
    target_dists: Tensor,
    proposal_dists: Tensor,
    candidate_tokens: Tensor,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling of candidates drawn from `proposal_dists`.

    Args:
        target_dists: [K+1, V] normalised probabilities, any float dtype.
        proposal_dists: [K, V] normalised probabilities, any float dtype.
        candidate_tokens: [K] int32 or int64.
        generator: draws the seed of the call; None: torch's global one.

    Returns:
        `rejected_idx`, the first refused position (K when none is), and the token drawn there, from the bonus row
        when all stay; both 0-dim int64.

    Raises:
        ShapeError: a shape or dtype that does not fit.
    """
    _check_candidates(target_dists, candidate_tokens)
    num_candidates, vocab_size = candidate_tokens.shape[0], target_dists.shape[1]
    check_shape("proposal_dists", proposal_dists, "K, V", (num_candidates, vocab_size))
    check_dtype("proposal_dists", proposal_dists, FLOAT_DTYPES)
    device = target_dists.device
    drawn_on = device if generator is None else generator.device
    seeds = torch.randint(2**63 - 1, (1,), generator=generator, device=drawn_on).to(device)
    nothing = torch.zeros_like(seeds)
    verdict = verify_rejection(
        target_dists.to(torch.float32).log().unsqueeze(0),
        candidate_tokens.unsqueeze(0),
        proposal_dists.to(torch.float32).log().unsqueeze(0),
        keys=NoiseKeys(seeds, nothing, nothing),
    )
    return _end_of(verdict)
