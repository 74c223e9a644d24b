"""Kernel launches: grids, scratch memory and shared arguments."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._inputs import Proposal, Round, Warp
from ..types import NoiseKeys

# Entries per chunk of a row; fixed, because it determines the rounding of sums.
CHUNK = 4096
# Pieces of a chunk that a race reads at once. Larger pieces are wider loads of a bf16 row (16 bytes instead of 8), but
# take 93 to 100 registers instead of 48 to 64 on cuda 90, which halves the programs that a multiprocessor holds.
PIECES_PER_CHUNK = 4
# Programs of a race over all sequences. An estimate, not measured yet: four on each of 132 multiprocessors.
RACE_PROGRAMS = 528
# The same for all kernels, so that all merge rows in the same order. Eight warps hold a chunk without spilling.
NUM_WARPS = 8


def chunks_per_program(num_rows: int) -> int:
    """Number of chunks that one program reads: few rows need many programs, many rows need few.

    An estimate, not measured yet: V = 151,936 gives 38 chunks per row, and a large GPU holds a few hundred programs.
    """
    if num_rows <= 24:
        return 1
    return 2 if num_rows <= 192 else 4


def pieces_per_program(batch_size: int, num_pieces: int) -> int:
    """Number of pieces of one row that one program races: the fewest with at most RACE_PROGRAMS programs."""
    return -(-num_pieces // max(1, RACE_PROGRAMS // max(1, batch_size)))


def is_aligned(logits: Tensor) -> bool:
    """Whether V and the start of every row are multiples of 16 entries, as wide loads require."""
    strides = logits.stride()
    is_even = all(stride % 16 == 0 for stride in (*strides[:-1], logits.shape[-1]))
    return is_even and strides[-1] == 1 and logits.data_ptr() % 16 == 0


def has_atomics(device: torch.device) -> bool:
    """Whether the last program to finish can write the verdict; otherwise another launch does."""
    return device.type == "cuda" and torch.version.hip is None


@dataclass
class Launch:
    """Arguments and scratch memory that the launches of one operation share.

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
        self.batch_size, num_positions, self.vocab_size = target.shape
        self.num_draft_tokens = num_positions - 1
        self.num_chunks = -(-self.vocab_size // CHUNK)
        draft = None if self.proposal is None else self.proposal.logits
        draft_strides = (0, 0, 0) if draft is None else draft.stride()
        keys = (None, None, None) if self.keys is None else tuple(key.contiguous() for key in self.keys)
        self.reads_draft_stats = self.proposal is not None and self.proposal.logsumexp is None
        self.num_rows = self.batch_size * (num_positions + (self.num_draft_tokens if self.reads_draft_stats else 0))
        self.chunks_per_program = chunks_per_program(self.num_rows)
        self.num_programs = -(-self.num_chunks // self.chunks_per_program)
        num_pieces = -(-self.vocab_size * PIECES_PER_CHUNK // CHUNK)
        self.pieces_per_program = pieces_per_program(self.batch_size, num_pieces)
        self.num_race_programs = -(-num_pieces // self.pieces_per_program)
        self.floats = self.scratch(self.num_float_planes, self.num_rows, self.num_chunks)
        self.ints = self.scratch(self.num_int_planes, self.num_rows, self.num_chunks, dtype=torch.int32)
        temperature, row_cutoffs = self.warp
        is_tensor = isinstance(temperature, Tensor)
        self.shared = {
            "target_ptr": target,
            **dict(zip(("target_stride_b", "target_stride_i", "target_stride_v"), target.stride(), strict=True)),
            "draft_ptr": draft,
            **dict(zip(("draft_stride_b", "draft_stride_i", "draft_stride_v"), draft_strides, strict=True)),
            "ids_ptr": ids.contiguous(),
            "lens_ptr": None if lens is None else lens.contiguous(),
            # A temperature of 1.0 is compiled out; 1.0 is a placeholder if the temperature is a tensor.
            "temperature": 1.0 if is_tensor else (None if temperature == 1.0 else float(temperature)),
            "temperatures_ptr": temperature.contiguous() if isinstance(temperature, Tensor) else None,
            "cutoffs_ptr": None if row_cutoffs is None else row_cutoffs.to(torch.float32).contiguous(),
            **dict(zip(("seeds_ptr", "rounds_ptr", "positions_ptr"), keys, strict=True)),
            "floats_ptr": self.floats,
            "ints_ptr": self.ints,
            "plane": self.num_rows * self.num_chunks,
            "num_sequences": self.batch_size,
            "num_draft_tokens": self.num_draft_tokens,
            "vocab_size": self.vocab_size,
            "num_chunks": self.num_chunks,
            "chunks_per_program": self.chunks_per_program,
            "pieces_per_program": self.pieces_per_program,
            "TOP_IDS": is_tensor or self.warp.is_greedy,  # whether a row can be at temperature 0
            "ALIGNED": is_aligned(target) and (draft is None or is_aligned(draft)),
            "CHUNK": CHUNK,
            "PIECE": CHUNK // PIECES_PER_CHUNK,
        }

    def scratch(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory on the device of the logits."""
        return torch.empty(shape, dtype=dtype, device=self.round_.target_logits.device)

    def run(self, kernel: Any, grid: tuple[int, ...], **extra: Any) -> None:
        """Launch `kernel` with the shared arguments that it names and `extra`, which take precedence."""
        names = frozenset(kernel.arg_names)
        shared = {name: value for name, value in self.shared.items() if name in names}
        device = self.round_.target_logits.device  # Triton launches on the current device, which may be another
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[grid](**{**shared, **extra}, num_warps=NUM_WARPS)
