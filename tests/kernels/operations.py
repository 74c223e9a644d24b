"""Provide operations, rounds, memory layouts and checks for the kernel tests."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_speculate.kernels import Verdict
from hf_speculate.options.cuda.kernel_operations import (
    DENSE,
    HOSTILE,
    OPERATIONS,
    FaultyRound,
    Operation,
    make_faulty_round,
    make_round,
    spoil,
    warp_of,
)

__all__ = [
    "DENSE",
    "HOSTILE",
    "OPERATIONS",
    "WARPABLE",
    "FaultyRound",
    "NoHostSync",
    "Operation",
    "assert_well_formed",
    "layouts",
    "make_contested_round",
    "make_faulty_round",
    "make_round",
    "spoil",
    "warp_of",
]


# Operations with options for a temperature and for cutoffs.
WARPABLE = ["rejection", "point mass", "block", "coupled", "typical", "typical, sampled"]


def make_contested_round(
    num_rows: int, num_draft_tokens: int, vocab_size: int, *, distance: float = 0.7
) -> tuple[Tensor, Tensor, Tensor]:
    """Return target, ids sampled from the draft, and draft, with rejections at every position."""
    generator = torch.Generator().manual_seed(vocab_size)
    target = 2 * torch.randn(num_rows, num_draft_tokens + 1, vocab_size, generator=generator)
    draft = target[:, :-1] + distance * torch.randn(
        num_rows, num_draft_tokens, vocab_size, generator=generator
    )
    ids = torch.multinomial(draft.softmax(-1).flatten(0, 1), 1, generator=generator).view(
        num_rows, -1
    )
    return target, ids, draft


def layouts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield [B, N, V] values transposed in memory, then as a view that skips rows and columns."""
    yield tensor.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    wide = tensor.new_full(
        (tensor.shape[0], 2 * tensor.shape[1], 2 * tensor.shape[2] + 3), torch.nan
    )
    view = wide[:, ::2, 3::2]
    yield view.copy_(tensor)


def assert_well_formed(verdict: Verdict, vocab_size: int, lens: Tensor) -> None:
    """Assert valid ids followed by -1, counts within the lengths, and the documented dtypes."""
    assert verdict.token_ids.dtype == torch.int64
    assert verdict.num_accepted.dtype == verdict.status.dtype == torch.int32
    columns = torch.arange(verdict.token_ids.shape[1])
    emitted = columns <= verdict.num_accepted.unsqueeze(-1)
    in_range = (verdict.token_ids >= 0) & (verdict.token_ids < vocab_size)
    assert torch.where(emitted, in_range, verdict.token_ids == -1).all()
    assert ((verdict.num_accepted >= 0) & (verdict.num_accepted <= lens)).all()


class NoHostSync(TorchDispatchMode):
    """Dispatch mode that forbids host synchronisation.

    It raises if a result would have to be read by the host.
    """

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(func.name().split("::")[1].split(".")[0].startswith(name) for name in self.WAITS):
            raise AssertionError(f"{func.name()} waits for the device")
        return func(*args, **(kwargs or {}))
