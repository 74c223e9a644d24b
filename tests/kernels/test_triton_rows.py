"""Test aligned vector loads for rows at any address, without reads outside the storage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.kernels import Stream, sample, warp_logits
from tests.kernels.distributions import make_keys
from tests.kernels.on_triton import DEVICE, assert_same, on_triton
from tests.kernels.operations import OPERATIONS, make_round

pytest.importorskip("triton", reason="needs Triton")
import triton
import triton.language as tl
from triton.runtime import interpreter

from hf_speculate.kernels._inputs import Proposal, Round, Warp
from hf_speculate.kernels.kernels import launch, rows

CHUNK = 32
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@triton.jit
def rows_kernel(logits_ptr, out_ptr, stride, vocab_size, num_chunks, CHUNK: tl.constexpr):
    """Write the rows, in chunks as `load_chunk` reads them, to `out_ptr` [rows, chunks, CHUNK]."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + rows.row_offset(row, row * 0, stride, 0, rows.SHIFTED)
    for chunk in range(num_chunks):
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = rows.load_chunk(row_ptr, 1, chunk * CHUNK, token_ids, vocab_size, rows.SHIFTED)
        tl.store(out_ptr + row * num_chunks * CHUNK + token_ids, x)


@contextmanager
def only_reading(storage: torch.UntypedStorage) -> Iterator[list[int]]:
    """Fail if the interpreter loads outside `storage`; yield the size in bytes of every load."""
    load, sizes = interpreter.InterpreterBuilder.create_masked_load, []

    def checked_load(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        read = pointers.data[mask.data]
        assert (read >= storage.data_ptr()).all()
        assert (read + size <= storage.data_ptr() + storage.nbytes()).all()
        sizes.extend([size] * read.size)
        return load(self, pointers, mask, *args)

    interpreter.InterpreterBuilder.create_masked_load = checked_load
    try:
        yield sizes
    finally:
        interpreter.InterpreterBuilder.create_masked_load = load


@pytest.mark.parametrize(
    "vocab_size", [1, 7, 9, CHUNK - 1, CHUNK, CHUNK + 9, 2 * CHUNK + 1, 2 * CHUNK + 12]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_read_without_leaving_their_storage(dtype: torch.dtype, vocab_size: int) -> None:
    """Start nine rows of odd length at every alignment, with NaN and infinities."""
    logits = 50 * torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[2::3, ::4], logits[1::3, 2::4], logits[::3, 1::4] = torch.nan, torch.inf, -torch.inf
    logits = logits.to(dtype).to(DEVICE)
    num_chunks = -(-vocab_size // CHUNK)
    out = torch.full((9, num_chunks * CHUNK), 7.0, device=DEVICE)
    arguments = (logits, out, vocab_size, vocab_size, num_chunks, CHUNK)
    assert logits.untyped_storage().nbytes() == logits.numel() * dtype.itemsize
    if DEVICE == "cpu":
        with only_reading(logits.untyped_storage()) as sizes:
            rows_kernel[(9,)](*arguments)
        # other loads read eight bytes
        assert sizes.count(dtype.itemsize) < 9 * 16 // dtype.itemsize * num_chunks
    else:
        rows_kernel[(9,)](*arguments)
    torch.testing.assert_close(
        out[:, :vocab_size], logits.float(), rtol=0.0, atol=0.0, equal_nan=True
    )
    assert (out[:, vocab_size:] == -torch.inf).all()


def between_nans(logits: Tensor, start: int) -> Tensor:
    """Copy the values to rows at any address, with NaN before, between and after the rows."""
    *sizes, vocab_size = logits.shape
    storage = logits.new_full((start + sizes[0] * sizes[1] * (vocab_size + 3),), torch.nan)
    strides = (sizes[1] * (vocab_size + 3), vocab_size + 3, 1)
    return storage.as_strided(logits.shape, strides, start).copy_(logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", ["greedy", "rejection, warped", "block", "coupled", "typical, sampled"]
)
def test_rows_between_nans_are_decided_as_aligned_rows(name: str, dtype: torch.dtype) -> None:
    target, ids, draft = make_round(2, 2, launch.CHUNK + 1136)
    target, draft, keys = target.to(dtype), draft.to(dtype), make_keys(2)
    shifted = on_triton(
        OPERATIONS[name], between_nans(target, 5), ids, between_nans(draft, 2), keys
    )
    assert_same(shifted, OPERATIONS[name](target, ids, draft, keys, backend="torch"))
    drawn = [
        on_triton(sample, rows[:, 0], keys=keys, stream=Stream.RACE)
        for rows in (target, between_nans(target, 3))
    ]
    assert torch.equal(drawn[0].token_ids, drawn[1].token_ids)
    assert torch.equal(drawn[0].logsumexp, drawn[1].logsumexp)
    cut = [
        on_triton(warp_logits, rows[:, 0], top_k=50) for rows in (target, between_nans(target, 3))
    ]
    assert torch.equal(*cut)


def test_row_layout_follows_from_addresses() -> None:
    def read(target: Tensor, draft: Tensor | None = None) -> int:
        round_ = Round(target, torch.zeros(2, 2, dtype=torch.int64), None)
        proposal = None if draft is None else Proposal(draft, None)
        return launch.Launch(round_, Warp(), None, proposal, 1, 1).shared["ROWS"]

    even, odd = torch.zeros(2, 3, 64), torch.zeros(2, 3, 33)
    assert read(even) == read(even, even[:, 1:]) == int(rows.ALIGNED)
    assert (
        read(odd)
        == read(even[:, :, 1:])
        == read(even, between_nans(even[:, 1:], 5))
        == int(rows.SHIFTED)
    )
    assert (
        read(odd.transpose(1, 2)[:, :3, :3])
        == read(odd, odd[:, 1:, ::2])
        == read(odd.double())
        == int(rows.STRIDED)
    )
    unaligned = torch.frombuffer(bytearray(4 * 199), dtype=torch.float32, offset=4)[
        : 2 * 3 * 33
    ].view(2, 3, 33)
    assert unaligned.untyped_storage().data_ptr() % 16 == 4
    assert read(unaligned) == read(odd, unaligned[:, 1:]) == int(rows.STRIDED), (
        "there is no memory below its start"
    )
