"""FlashInfer's `chain_speculative_sampling`, which takes normalised probabilities.

A position emits -1 instead of a token if its row has a NaN, an infinite entry, or no positive
entry.
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
    """Convert `value` to [1] or [B] int64."""
    if not isinstance(value, Tensor):
        return row_seeds(value, 1, device=device)  # value modulo 2**64
    if value.shape not in ((1,), (num_rows,)):
        raise ShapeError(
            f"{name} must be an int, [1] or [B] = [{num_rows}], got {list(value.shape)}"
        )
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
    """Verify by rejection sampling from probabilities, like FlashInfer's function of this name.

    `verify_rejection` is the equivalent for logits.

    Args:
        draft_probs: [B, K, V] probabilities, any float dtype; each row is divided by its sum.
        draft_token_ids: [B, K] int32 or int64, sampled from `draft_probs`. An id outside [0, V) is
            rejected.
        target_probs: [B, K+1, V] probabilities, any float dtype; each row is divided by its sum.
        maybe_output_accepted_token_num: [B] int32 or int64 counter, incremented in place.
        maybe_output_emitted_draft_token_num: [B] int32 or int64 counter, incremented in place.
        deterministic: ignored, since results are always deterministic.
        generator: draws the seed if `seed` is None; None means torch's global generator.
        seed: an integer or a tensor [1] for `row_seeds`, or the row seeds [B]. Tensors are int32 or
            int64 and stay on their device.
        offset: the number of calls so far with this seed, an integer, [1] or [B]; None means 0.
            Equal seeds and offsets give equal random numbers.
        backend: "auto", "torch" or "triton".

    Returns:
        The token ids [B, K+1] int32 (accepted prefix, correction or bonus token, then -1), the
        number of drafted tokens that pass their own acceptance test, even after a rejected token,
        and the number of accepted tokens. The two counts are the given counters, or new tensors [B]
        int32.

    Raises:
        ConfigError: the backend is unknown.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: a tensor has the wrong shape or dtype.

    Source: Chen et al., arXiv:2302.01318, algorithm 2.
    """
    check_logits("target_probs", target_probs, "B, K+1, V")
    num_rows, num_positions, vocab_size = target_probs.shape
    check_shape("draft_token_ids", draft_token_ids, "B, K", (num_rows, num_positions - 1))
    check_dtype("draft_token_ids", draft_token_ids, ID_DTYPES)
    check_shape("draft_probs", draft_probs, "B, K, V", (num_rows, num_positions - 1, vocab_size))
    check_dtype("draft_probs", draft_probs, FLOAT_DTYPES)
    _check_counter("maybe_output_accepted_token_num", maybe_output_accepted_token_num, num_rows)
    _check_counter(
        "maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num, num_rows
    )
    device = target_probs.device
    implementation = operations(backend, device)
    seeds = (
        draw_seed(generator, device) if seed is None else _per_row("seed", seed, num_rows, device)
    )
    seeds = seeds if seeds.shape[0] == num_rows else row_seeds(seeds, num_rows)
    rounds = (
        _per_row("offset", 0 if offset is None else offset, num_rows, device)
        .expand(num_rows)
        .contiguous()
    )
    keys = NoiseKeys(seeds, rounds, torch.zeros_like(seeds))
    target_logits = target_probs.to(torch.float32).log()
    proposal = Proposal(draft_probs.to(torch.float32).log(), None)
    verdict, passed = implementation.reject_and_test(
        Round(target_logits, draft_token_ids, None), proposal, keys
    )
    accepted = passed.sum(-1, dtype=torch.int32)
    emitted = verdict.num_accepted
    if maybe_output_accepted_token_num is not None:
        accepted = maybe_output_accepted_token_num.add_(accepted)
    if maybe_output_emitted_draft_token_num is not None:
        emitted = maybe_output_emitted_draft_token_num.add_(emitted)
    return mask_undefined_draws(verdict, target_logits).to(torch.int32), accepted, emitted
