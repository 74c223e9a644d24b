"""Kernel launches: grids, scratch memory and shared arguments."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._inputs import Proposal, Round, Warp
from ..types import NoiseKeys
from .rows import ALIGNED, SHIFTED, STRIDED

# Entries per chunk of a row. The number is fixed, because it determines the rounding of sums.
CHUNK = 4096
# Size of the pieces that a race reads at once: eight entries per thread, or 16 bytes of a bf16 row.
PIECES_PER_CHUNK = 4
# Number of programs in a race, over all sequences. This is an estimate, not yet measured: four on
# each of 132 multiprocessors, which can hold five. Every program re-tests the accepted prefix
# before it races, so in large batches extra programs cost more than their overlap saves.
RACE_PROGRAMS = 528
# The same for all kernels, so that all merge rows in the same order. Four warps hold a chunk
# without spilling, and spend fewer instructions on reductions than eight warps.
NUM_WARPS = 4


def chunks_per_program(num_rows: int) -> int:
    """Return the number of chunks per program; few rows need many programs, many rows need few.

    This is an estimate, not yet measured: V = 151,936 gives 38 chunks per row, and a large GPU
    holds a few hundred programs.
    """
    if num_rows <= 24:
        return 1
    return 2 if num_rows <= 192 else 4


def pieces_per_program(batch_size: int, num_pieces: int) -> int:
    """Return how many pieces of a row each program races.

    This is the smallest number with at most RACE_PROGRAMS programs.
    """
    return -(-num_pieces // max(1, RACE_PROGRAMS // max(1, batch_size)))


def has_atomics(device: torch.device) -> bool:
    """Return whether the last program can write the verdict; otherwise another launch does."""
    return device.type == "cuda" and torch.version.hip is None


class Layout(NamedTuple):
    """Sizes and grids for the shapes and strides of an operation."""

    num_rows: int
    num_chunks: int
    num_programs: int  # programs per row in the first launch
    num_race_programs: int  # programs per sequence in the last launch
    arguments: dict[str, int]
    # V and all strides between rows are multiples of 16 entries, as wide loads require
    has_even_rows: bool


@lru_cache(maxsize=64)
def _layout(
    shape: torch.Size, strides: tuple[int, ...], draft_strides: tuple[int, ...], num_rows: int,
    chunk: int, num_chunks_per_program: int,
) -> Layout:  # fmt: skip
    """Compute the layout for target logits [B, K+1, V] and draft logits.

    Args:
        shape: shape of the target logits.
        strides: strides of the target logits.
        draft_strides: strides of the draft logits; (0, 0, 1) if there are none.
        num_rows: number of rows in both.
        chunk: entries per chunk.
        num_chunks_per_program: chunks read by one program.
    """
    batch_size, num_positions, vocab_size = shape
    num_chunks = -(-vocab_size // chunk)
    num_pieces = -(-vocab_size * PIECES_PER_CHUNK // chunk)
    num_pieces_per_program = pieces_per_program(batch_size, num_pieces)
    names = ("stride_b", "stride_i", "stride_v")
    arguments = {
        **{f"target_{name}": stride for name, stride in zip(names, strides, strict=True)},
        **{f"draft_{name}": stride for name, stride in zip(names, draft_strides, strict=True)},
        "plane": num_rows * num_chunks,
        "num_sequences": batch_size,
        "num_draft_tokens": num_positions - 1,
        "vocab_size": vocab_size,
        "num_chunks": num_chunks,
        "chunks_per_program": num_chunks_per_program,
        "pieces_per_program": num_pieces_per_program,
        "CHUNK": chunk,
        "PIECE": chunk // PIECES_PER_CHUNK,
    }
    return Layout(
        num_rows,
        num_chunks,
        -(-num_chunks // num_chunks_per_program),
        -(-num_pieces // num_pieces_per_program),
        arguments,
        all(stride % 16 == 0 for stride in (*strides[:2], *draft_strides[:2], vocab_size))
        and strides[2] == draft_strides[2] == 1,
    )


def _rows(layout: Layout, logits: list[Tensor]) -> int:
    """Return how the kernels read the rows of `logits`: STRIDED, ALIGNED or SHIFTED."""
    if layout.has_even_rows and all(tensor.data_ptr() % 16 == 0 for tensor in logits):
        return int(ALIGNED)
    for tensor in logits:
        # SHIFTED reads from the aligned address before a row's start, which must be inside the
        # storage.
        if (
            tensor.stride(-1) != 1
            or tensor.element_size() > 4
            or tensor.untyped_storage().data_ptr() % 16 != 0
        ):
            return int(STRIDED)
    return int(SHIFTED)


@dataclass
class Launch:
    """Arguments and scratch memory for the launches of one operation.

    Args:
        round_: target logits and drafted tokens.
        warp: temperature and cutoffs.
        keys: keys of the noise; None if nothing is sampled.
        proposal: draft distributions; None if they are not read.
        num_float_planes: float32 values stored per chunk.
        num_int_planes: int32 values stored per chunk.
    """

    round_: Round
    warp: Warp
    keys: NoiseKeys | None
    proposal: Proposal | None
    num_float_planes: int
    num_int_planes: int
    shared: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        target, ids, lens = self.round_
        self.batch_size, num_positions, self.vocab_size = shape = target.shape
        self.num_draft_tokens = num_positions - 1
        self.device = target.device
        draft, logsumexp = (None, None) if self.proposal is None else self.proposal
        self.reads_draft_stats = draft is not None and logsumexp is None
        num_rows = self.batch_size * (
            num_positions + (self.num_draft_tokens if self.reads_draft_stats else 0)
        )
        draft_strides = (0, 0, 1) if draft is None else draft.stride()
        self.layout = _layout(
            shape, target.stride(), draft_strides, num_rows, CHUNK, chunks_per_program(num_rows)
        )
        self.floats = self.scratch(self.num_float_planes, num_rows, self.layout.num_chunks)
        self.ints = self.scratch(
            self.num_int_planes, num_rows, self.layout.num_chunks, dtype=torch.int32
        )
        temperature, row_cutoffs = self.warp
        is_tensor = isinstance(temperature, Tensor)
        seeds, rounds, positions = (None, None, None) if self.keys is None else self.keys
        self.shared = {
            **self.layout.arguments,
            "target_ptr": target,
            "draft_ptr": draft,
            "ids_ptr": ids.contiguous(),
            "lens_ptr": None if lens is None else lens.contiguous(),
            # A temperature of 1.0 is compiled away. If the temperature is a tensor, 1.0 is a
            # placeholder.
            "temperature": 1.0
            if is_tensor
            else (None if temperature == 1.0 else float(temperature)),
            "temperatures_ptr": temperature.contiguous()
            if isinstance(temperature, Tensor)
            else None,
            "cutoffs_ptr": None
            if row_cutoffs is None
            else row_cutoffs.to(torch.float32).contiguous(),
            "seeds_ptr": None if seeds is None else seeds.contiguous(),
            "rounds_ptr": None if rounds is None else rounds.contiguous(),
            "positions_ptr": None if positions is None else positions.contiguous(),
            "floats_ptr": self.floats,
            "ints_ptr": self.ints,
            "TOP_IDS": is_tensor or temperature == 0.0,  # whether a row can be at temperature 0
            "ROWS": _rows(self.layout, [target] if draft is None else [target, draft]),
        }

    def scratch(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate uninitialised memory on the device of the logits."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def run(self, kernel: Any, grid: tuple[int, ...], **extra: Any) -> None:
        """Launch `kernel` with the shared arguments that it names; `extra` takes precedence."""
        by_name = {**self.shared, **extra}
        arguments = [by_name[name] for name in _arg_names(kernel)]
        if self.device.type != "cuda" or self.device.index == torch.cuda.current_device():
            kernel[grid](*arguments, num_warps=NUM_WARPS)
            return
        with torch.cuda.device(self.device):  # Triton launches on the current device
            kernel[grid](*arguments, num_warps=NUM_WARPS)


_ARG_NAMES: dict[str, tuple[str, ...]] = {}


def _arg_names(kernel: Any) -> tuple[str, ...]:
    """Return the names of a kernel's arguments; Triton rebuilds the list on every access."""
    name = kernel.__name__
    if name not in _ARG_NAMES:
        _ARG_NAMES[name] = tuple(kernel.arg_names)
    return _ARG_NAMES[name]
