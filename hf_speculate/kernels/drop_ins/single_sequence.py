"""Verify a single sequence from normalised probabilities: greedily or by rejection sampling."""

import torch
from torch import Tensor

from .._checks import FLOAT_DTYPES, ID_DTYPES, check_dtype, check_logits, check_shape
from ..greedy import verify_greedy
from ..rejection import verify_rejection
from ..types import NoiseKeys, Verdict
from .common import draw_seed, mask_undefined_draws


def _check_candidates(target_dists: Tensor, candidate_tokens: Tensor) -> None:
    check_logits("target_dists", target_dists, "K+1, V")
    check_shape("candidate_tokens", candidate_tokens, "K", (target_dists.shape[0] - 1,))
    check_dtype("candidate_tokens", candidate_tokens, ID_DTYPES)


def _first_rejection(verdict: Verdict, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first rejected token and the token emitted there.

    Args:
        verdict: the verdict for a batch of one.
        logits: [1, K+1, V].
    """
    rejected_idx = verdict.num_accepted.to(torch.int64)
    return rejected_idx[0], mask_undefined_draws(verdict, logits)[0].gather(0, rejected_idx)[0]


@torch.no_grad()
def greedy_match(
    target_dists: Tensor, candidate_tokens: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compare candidates with the target's most probable tokens; ties go to the lowest index.

    Args:
        target_dists: [K+1, V] probabilities, any float dtype; only their order matters.
        candidate_tokens: [K] int32 or int64.
        backend: "auto", "torch" or "triton".

    Returns:
        `rejected_idx`, the first position where the tokens differ (K if there is none), and the
        target's most probable token there; both are 0-dim int64.

    Raises:
        ConfigError: the backend is unknown.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: a tensor has the wrong shape or dtype.
    """
    _check_candidates(target_dists, candidate_tokens)
    batch = target_dists.unsqueeze(0)
    return _first_rejection(
        verify_greedy(batch, candidate_tokens.unsqueeze(0), backend=backend), batch
    )


@torch.no_grad()
def speculative_sampling(
    target_dists: Tensor,
    proposal_dists: Tensor,
    candidate_tokens: Tensor,
    *,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Verify candidates sampled from `proposal_dists` by rejection sampling.

    Args:
        target_dists: [K+1, V] normalised probabilities, any float dtype.
        proposal_dists: [K, V] normalised probabilities, any float dtype.
        candidate_tokens: [K] int32 or int64.
        generator: draws the seed of the call; None means torch's global generator.
        backend: "auto", "torch" or "triton".

    Returns:
        `rejected_idx`, the first rejected position (K if all are accepted), and the correction or
        bonus token sampled there; both are 0-dim int64.

    Raises:
        ConfigError: the backend is unknown.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: a tensor has the wrong shape or dtype.
    """
    _check_candidates(target_dists, candidate_tokens)
    num_candidates, vocab_size = candidate_tokens.shape[0], target_dists.shape[1]
    check_shape("proposal_dists", proposal_dists, "K, V", (num_candidates, vocab_size))
    check_dtype("proposal_dists", proposal_dists, FLOAT_DTYPES)
    seeds = draw_seed(generator, target_dists.device)
    zeros = torch.zeros_like(seeds)
    target_logits = target_dists.to(torch.float32).log().unsqueeze(0)
    verdict = verify_rejection(
        target_logits,
        candidate_tokens.unsqueeze(0),
        proposal_dists.to(torch.float32).log().unsqueeze(0),
        keys=NoiseKeys(seeds, zeros, zeros),
        backend=backend,
    )
    return _first_rejection(verdict, target_logits)
