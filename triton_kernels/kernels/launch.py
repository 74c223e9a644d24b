"""How kernels are launched: grids, scratch memory, and the arguments that all of them share."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._inputs import Proposal, Round, Warp
from ..types import NoiseKeys

# What a row is cut into; fixed, because sums are rounded chunk by chunk.
CHUNK = 4096
# One count for all kernels: rows are then merged in the same order everywhere. Eight hold a chunk without spilling.
NUM_WARPS = 8


def chunks_per_program(num_rows: int) -> int:
    """How many chunks one program reads: few rows need all the programs they can get, many rows need fewer launches.

    Sized by count (V = 151,936 gives 38 chunks a row, a large GPU holds a few hundred programs); not yet measured.
    """
    if num_rows <= 24:
        return 1
    return 2 if num_rows <= 192 else 4


def is_aligned(logits: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 entries, as wide loads need, and the vocabulary is one too."""
    strides = logits.stride()
    is_even = all(stride % 16 == 0 for stride in (*strides[:-1], logits.shape[-1]))
    return is_even and strides[-1] == 1 and logits.data_ptr() % 16 == 0


def has_atomics(device: torch.device) -> bool:
    """Whether the last program to arrive may finish for the others; elsewhere one more launch does."""
    return device.type == "cuda" and torch.version.hip is None


@dataclass
class Launch:
    """The arguments of one operation's launches, which differ in what they take of them.

    Args:
        round_: logits and drafts.
        warp: temperature and cutoffs.
        keys: the noise; None where nothing is drawn.
        proposal: the draft's laws; None where they are not read.
        num_float_planes: floats kept of every chunk.
        num_int_planes: ids kept of every chunk.
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
        self.reads_draft_stats = self.proposal is not None and self.proposal.logsumexp is None
        self.num_rows = self.batch_size * (num_positions + (self.num_draft_tokens if self.reads_draft_stats else 0))
        self.chunks_per_program = chunks_per_program(self.num_rows)
        self.num_programs = -(-self.num_chunks // self.chunks_per_program)
        self.floats = self.scratch(self.num_float_planes, self.num_rows, self.num_chunks)
        self.ints = self.scratch(self.num_int_planes, self.num_rows, self.num_chunks, dtype=torch.int32)
        temperature, row_cutoffs = self.warp
        is_tensor = isinstance(temperature, Tensor)
        self.shared = {
            "target_ptr": target,
            **dict(zip(("target_stride_b", "target_stride_i", "target_stride_v"), target.stride(), strict=True)),
            "draft_ptr": draft,
            **dict(
                zip(
                    ("draft_stride_b", "draft_stride_i", "draft_stride_v"),
                    (0, 0, 0) if draft is None else draft.stride(),
                    strict=True,
                )
            ),
            "ids_ptr": ids.contiguous(),
            "lens_ptr": None if lens is None else lens.contiguous(),
            # 1.0 is left out of the kernel, and a tensor needs a float in its place only where it is read.
            "temperature": 1.0 if is_tensor else (None if temperature == 1.0 else float(temperature)),
            "temperatures_ptr": temperature.contiguous() if isinstance(temperature, Tensor) else None,
            "cutoffs_ptr": None if row_cutoffs is None else row_cutoffs.to(torch.float32).contiguous(),
            **dict(
                zip(
                    ("seeds_ptr", "rounds_ptr", "positions_ptr"),
                    (None, None, None) if self.keys is None else (key.contiguous() for key in self.keys),
                    strict=True,
                )
            ),
            "floats_ptr": self.floats,
            "ints_ptr": self.ints,
            "plane": self.num_rows * self.num_chunks,
            "num_sequences": self.batch_size,
            "num_draft_tokens": self.num_draft_tokens,
            "vocab_size": self.vocab_size,
            "num_chunks": self.num_chunks,
            "chunks_per_program": self.chunks_per_program,
            "ALIGNED": is_aligned(target) and (draft is None or is_aligned(draft)),
            "CHUNK": CHUNK,
        }

    def scratch(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory that the kernels fill themselves."""
        return torch.empty(shape, dtype=dtype, device=self.round_.target_logits.device)

    def run(self, kernel: Any, grid: tuple[int, ...], **own: Any) -> None:
        """Launch `kernel` with those of the shared arguments that it names, and its `own`."""
        names = frozenset(kernel.arg_names)
        given = {name: value for name, value in self.shared.items() if name in names}
        device = self.round_.target_logits.device  # Triton launches on the current one, which may be another
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[grid](**{**given, **own}, num_warps=NUM_WARPS)
