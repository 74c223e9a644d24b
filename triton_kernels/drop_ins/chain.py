"""Chain speculative sampling from normalised probabilities, with FlashInfer's signature.

A position whose row holds a NaN, an infinite entry or no positive entry emits -1 instead of a token.
"""

import torch
from torch import Tensor

from .._checks import FLOAT_DTYPES, ID_DTYPES, check_dtype, check_logits, check_shape
from .._inputs import Proposal, Round
from ..backends import operations
from ..errors import ShapeError
from ..noise import row_seeds
from ..types import NoiseKeys
from .common import draw_seed, mask_undefined_draws


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
    seeds = draw_seed(generator, device) if seed is None else _per_row("seed", seed, num_rows, device)
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
    return mask_undefined_draws(verdict, law).to(torch.int32), accepted, emitted
