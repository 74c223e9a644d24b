"""Verification kernels behind one signature, and example rounds for the kernel trial.

Some of the rounds contain hostile rows.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.kernels import (
    NoiseKeys,
    Status,
    Stream,
    Verdict,
    sample,
    verify_block,
    verify_coupled,
    verify_greedy,
    verify_rejection,
    verify_typical,
)

# A verifier of one round: target [B, K+1, V], ids [B, K], draft [B, K, V], keys, lengths [B] or
# None, and options.
Operation = Callable[..., Verdict]


def warp_of(target: Tensor, keys: NoiseKeys) -> dict[str, Tensor]:
    """Return temperatures of 0, 0.5 or 1 chosen by row seed, and cutoffs 3 below the row maxima."""
    temperature = (keys.seeds % 3).float() / 2
    tops = target.float().amax(-1) / temperature.masked_fill(temperature == 0, 1.0).unsqueeze(-1)
    return {"temperature": temperature, "row_cutoffs": tops - 3.0}


def sums_of(draft: Tensor, keys: NoiseKeys, backend: str) -> Tensor:
    """Compute log-sum-exps [B, K] of the drafts, as a drafter does."""
    sums = [
        sample(row, keys=keys, stream=Stream.DRAFT, backend=backend).logsumexp
        for row in draft.unbind(1)
    ]
    return (
        torch.stack(sums, dim=-1) if sums else draft.new_empty(draft.shape[:2], dtype=torch.float32)
    )


def _operation(
    verify: Any,
    *,
    is_dense: bool = False,
    with_sums: bool = False,
    is_warped: bool = False,
    **settings: Any,
) -> Operation:
    """Wrap `verify` as an `Operation`; a dense operation reads the draft's logits."""

    def run(
        target: Tensor,
        ids: Tensor,
        draft: Tensor,
        keys: NoiseKeys,
        lens: Tensor | None = None,
        *,
        backend: str = "auto",
        **warp: Any,
    ) -> Verdict:
        options = settings | (warp_of(target, keys) if is_warped else warp)
        if with_sums:
            options["draft_logsumexp"] = sums_of(draft, keys, backend)
        drafted = (draft,) if is_dense else ()
        verdict: Verdict = verify(
            target, ids, *drafted, keys=keys, draft_lens=lens, backend=backend, **options
        )
        return verdict

    return run


OPERATIONS: dict[str, Operation] = {
    "greedy": _operation(lambda *round_, keys, **options: verify_greedy(*round_, **options)),
    "rejection": _operation(verify_rejection, is_dense=True),
    "rejection with draft sums": _operation(verify_rejection, is_dense=True, with_sums=True),
    "rejection, warped": _operation(verify_rejection, is_dense=True, is_warped=True),
    "point mass": _operation(verify_rejection),
    "block": _operation(verify_block, is_dense=True),
    "block with draft sums": _operation(verify_block, is_dense=True, with_sums=True),
    "block, warped": _operation(verify_block, is_dense=True, is_warped=True),
    "coupled": _operation(verify_coupled),
    "coupled, warped": _operation(verify_coupled, is_warped=True),
    "typical": _operation(verify_typical),
    "typical, sampled": _operation(verify_typical, correction="sample", entropy_epsilon=1e-5),
}
# Operations with a dense draft.
DENSE = ["rejection", "rejection with draft sums", "block", "block with draft sums"]
# Value in a hostile row -> status of the row.
HOSTILE = {torch.nan: Status.NAN, -torch.inf: Status.ALL_MASKED, torch.inf: Status.POSITIVE_INF}


def make_round(
    num_rows: int, num_draft_tokens: int, vocab_size: int, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Make a round: target [B, K+1, V], ids [B, K] and draft [B, K, V].

    Most of the ids are likely, and the draft is near the target.
    """
    generator = torch.Generator().manual_seed(seed)
    target = (
        torch.randn(num_rows, num_draft_tokens + 1, vocab_size, generator=generator, device="cpu")
        * 2
    )
    draft = target[:, :-1] + 0.3 * torch.randn(
        num_rows, num_draft_tokens, vocab_size, generator=generator, device="cpu"
    )
    ids = target[:, :-1].argmax(-1)
    strays = torch.randint(0, vocab_size, ids.shape, generator=generator, device="cpu")
    return (
        target,
        torch.where(torch.rand(ids.shape, generator=generator, device="cpu") < 0.2, strays, ids),
        draft,
    )


def spoil(rows: Tensor, value: float) -> None:
    """Make rows [..., V] hostile in place: fill them with -inf, or set one entry in the middle."""
    rows[..., slice(None) if value == -torch.inf else rows.shape[-1] // 2] = value


class FaultyRound(NamedTuple):
    """Round with one fault in each row.

    A fault is a hostile row of the target or the draft, or invalid ids from some position on.
    """

    target: Tensor
    ids: Tensor
    draft: Tensor
    positions: Tensor  # [B] int64, positions of the faults
    flags: Tensor  # [B] int64, status of the fault
    # [B] bool, whether the target's row is hostile; any token is then correct at this position
    is_target: Tensor


def make_faulty_round(
    name: str, rows_per_fault: int, num_draft_tokens: int, vocab_size: int
) -> FaultyRound:
    """Make a round with every fault at every position, each in `rows_per_fault` rows.

    `name` is the name of the operation.
    """
    hostile: list[tuple[str, float]] = [
        ("id", 0.0),
        *itertools.product(("target", "draft"), HOSTILE),
    ]
    sources = [source for source in hostile if source[0] != "draft" or name in DENSE]
    faults = [(*source, position) for source in sources for position in range(num_draft_tokens)]
    target, ids, draft = make_round(rows_per_fault * len(faults), num_draft_tokens, vocab_size)
    target, draft = 4 * target, 4 * draft  # half of the tokens are kept
    bad_ids = torch.tensor(
        [-1, vocab_size, 2**31 - 1, -(2**31), 2**40, -(2**63)], device="cpu"
    ).repeat(rows_per_fault + num_draft_tokens)
    for index, (source, value, position) in enumerate(faults):
        rows = slice(rows_per_fault * index, rows_per_fault * (index + 1))
        if source == "id":
            ids[rows, position:] = bad_ids[index : index + rows_per_fault, None]
        else:
            spoil((target if source == "target" else draft)[rows, position], value)
    positions, flags, is_target = (
        torch.tensor(values, device="cpu").repeat_interleave(rows_per_fault)
        for values in (
            [position for _, _, position in faults],
            [HOSTILE.get(value, Status.BAD_DRAFT_ID) for _, value, _ in faults],
            [source == "target" for source, _, _ in faults],
        )
    )
    return FaultyRound(target, ids, draft, positions, flags, is_target)
