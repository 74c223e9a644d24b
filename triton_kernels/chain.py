"""FlashInfer's signature, with two of a single sequence, on our operations.

A token comes from a law or is no token: -1 stands where the row that it would be drawn from holds a NaN, an infinite
entry, or nothing positive.
"""

import torch
from torch import Tensor

from ._checks import FLOAT_DTYPES, ID_DTYPES, check_dtype, check_logits, check_shape
from ._inputs import Proposal, Round
from .backends import operations
from .errors import ShapeError
from .greedy import verify_greedy
from .noise import row_seeds
from .rejection import verify_rejection
from .types import NoiseKeys, Verdict


def without_lawless(verdict: Verdict, law: Tensor) -> Tensor:
    """The verdict's ids [B, K+1], but -1 for a token from a row of `law` [B, K+1, V] (logits) that is no law."""
    at = verdict.num_accepted.to(torch.int64)
    tops = law[torch.arange(law.shape[0], device=law.device), at].amax(-1)  # [B]
    here = at.unsqueeze(-1)
    drawn = verdict.token_ids.gather(1, here)
    return verdict.token_ids.scatter(1, here, torch.where(tops.abs().unsqueeze(-1) < torch.inf, drawn, -1))


def _draw_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """A seed [1] int64 from a generator, or from torch's global one."""
    drawn_on = device if generator is None else generator.device
    return torch.randint(2**63 - 1, (1,), generator=generator, device=drawn_on).to(device)


def _per_row(name: str, value: int | Tensor, num_rows: int, device: torch.device) -> Tensor:
    """`value` as [1] or [B] int64."""
    if not isinstance(value, Tensor):
        return row_seeds(value, 1, device=device)  # the integer modulo 2**64
    if value.shape not in ((1,), (num_rows,)):
        raise ShapeError(f"{name} must be an int, [1] or [B] = [{num_rows}], got {list(value.shape)}")
    check_dtype(name, value, ID_DTYPES)
    return value.to(device, torch.int64).contiguous()


def _check_counter(name: str, counter: Tensor | None, num_rows: int) -> None:
    if counter is not None:
        check_shape(name, counter, "B", (num_rows,))
        check_dtype(name, counter, ID_DTYPES)


@torch.no_grad()
def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Rejection sampling of drafted chains from probabilities: a drop-in for FlashInfer's function of this name.

    `verify_rejection` does the same from logits, without a softmax.

    Args:
        draft_probs: [B, K, V] probabilities, any float dtype; each row is divided by its sum.
        draft_token_ids: [B, K] int32 or int64, drawn from `draft_probs`. An id outside [0, V) is refused.
        target_probs: [B, K+1, V] probabilities, as `draft_probs`.
        maybe_output_accepted_token_num: [B] int32 or int64, added to in place.
        maybe_output_emitted_draft_token_num: [B] int32 or int64, added to in place.
        deterministic: kept for the signature; the result always is.
        generator: draws the seed where none is given; None: torch's global one.
        seed: an integer or [1]: row r gets the r-th of `row_seeds`; [B]: the rows' seeds as they stand. Tensors are
            int32 or int64 and not read on the host.
        offset: an integer, [1] or [B], counts the calls under one seed; None: 0. Equal seeds and offsets, equal noise.
        backend: "auto", "torch" or "triton".

    Returns:
        Ids [B, K+1] int32: the kept prefix, the token after it, then -1. How many drafted tokens pass their own test,
        also after a refused one, and how many were kept, without the token after them: the counters handed in, or
        [B] int32.

    Raises:
        ConfigError: an unknown backend.
        KernelUnavailableError: backend="triton" where it cannot run.
        ShapeError: a shape or dtype that does not fit.

    Source: Chen et al., arXiv:2302.01318, algorithm 2.
    """
    check_logits("target_probs", target_probs, "B, K+1, V")
    num_rows, num_positions, vocab_size = target_probs.shape
    check_shape("draft_token_ids", draft_token_ids, "B, K", (num_rows, num_positions - 1))
    check_dtype("draft_token_ids", draft_token_ids, ID_DTYPES)
    check_shape("draft_probs", draft_probs, "B, K, V", (num_rows, num_positions - 1, vocab_size))
    check_dtype("draft_probs", draft_probs, FLOAT_DTYPES)
    _check_counter("maybe_output_accepted_token_num", maybe_output_accepted_token_num, num_rows)
    _check_counter("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num, num_rows)
    device = target_probs.device
    chosen = operations(backend, device)
    seeds = _draw_seed(generator, device) if seed is None else _per_row("seed", seed, num_rows, device)
    seeds = seeds if seeds.shape[0] == num_rows else row_seeds(seeds, num_rows)
    rounds = _per_row("offset", 0 if offset is None else offset, num_rows, device).expand(num_rows).contiguous()
    keys = NoiseKeys(seeds, rounds, torch.zeros_like(seeds))
    law = target_probs.to(torch.float32).log()
    round_ = Round(law, draft_token_ids, None)
    proposal = Proposal(draft_probs.to(torch.float32).log(), None)
    verdict, passed = chosen.reject_and_test(round_, proposal, keys)
    accepted = passed.sum(-1, dtype=torch.int32)
    emitted = verdict.num_accepted
    if maybe_output_accepted_token_num is not None:
        accepted = maybe_output_accepted_token_num.add_(accepted)
    if maybe_output_emitted_draft_token_num is not None:
        emitted = maybe_output_emitted_draft_token_num.add_(emitted)
    return without_lawless(verdict, law).to(torch.int32), accepted, emitted


def _check_candidates(target_dists: Tensor, candidate_tokens: Tensor) -> None:
    check_logits("target_dists", target_dists, "K+1, V")
    check_shape("candidate_tokens", candidate_tokens, "K", (target_dists.shape[0] - 1,))
    check_dtype("candidate_tokens", candidate_tokens, ID_DTYPES)


def _end_of(verdict: Verdict, law: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first refusal and the token there, of a batch of one with `law` [1, K+1, V]."""
    rejected_idx = verdict.num_accepted.to(torch.int64)
    return rejected_idx[0], without_lawless(verdict, law)[0].gather(0, rejected_idx)[0]


@torch.no_grad()
def greedy_match(target_dists: Tensor, candidate_tokens: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Compare candidates with the target's most probable tokens (ties: the lowest index).

    Args:
        target_dists: [K+1, V] probabilities, any float dtype; only their order matters.
        candidate_tokens: [K] int32 or int64.
        backend: "auto", "torch" or "triton".

    Returns:
        `rejected_idx`, the first position that differs (K when none does), and the target's most probable token
        there; both 0-dim int64.

    Raises:
        ConfigError: an unknown backend.
        KernelUnavailableError: backend="triton" where it cannot run.
        ShapeError: a shape or dtype that does not fit.
    """
    _check_candidates(target_dists, candidate_tokens)
    batch = target_dists.unsqueeze(0)
    return _end_of(verify_greedy(batch, candidate_tokens.unsqueeze(0), backend=backend), batch)


@torch.no_grad()
def speculative_sampling(
    target_dists: Tensor,
    proposal_dists: Tensor,
    candidate_tokens: Tensor,
    *,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Rejection sampling of candidates drawn from `proposal_dists`.

    Args:
        target_dists: [K+1, V] normalised probabilities, any float dtype.
        proposal_dists: [K, V] normalised probabilities, any float dtype.
        candidate_tokens: [K] int32 or int64.
        generator: draws the seed of the call; None: torch's global one.
        backend: "auto", "torch" or "triton".

    Returns:
        `rejected_idx`, the first refused position (K when none is), and the token drawn there, from the bonus row
        when all stay; both 0-dim int64.

    Raises:
        ConfigError: an unknown backend.
        KernelUnavailableError: backend="triton" where it cannot run.
        ShapeError: a shape or dtype that does not fit.
    """
    _check_candidates(target_dists, candidate_tokens)
    num_candidates, vocab_size = candidate_tokens.shape[0], target_dists.shape[1]
    check_shape("proposal_dists", proposal_dists, "K, V", (num_candidates, vocab_size))
    check_dtype("proposal_dists", proposal_dists, FLOAT_DTYPES)
    seeds = _draw_seed(generator, target_dists.device)
    nothing = torch.zeros_like(seeds)
    law = target_dists.to(torch.float32).log().unsqueeze(0)
    verdict = verify_rejection(
        law,
        candidate_tokens.unsqueeze(0),
        proposal_dists.to(torch.float32).log().unsqueeze(0),
        keys=NoiseKeys(seeds, nothing, nothing),
        backend=backend,
    )
    return _end_of(verdict, law)
