"""Counts machine instructions of a compiled kernel, and the time that they take on a GPU that is not there."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._harness import markdown

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# An H200: multiprocessors, schedulers of each, clock; and the share of cycles in which a scheduler issues.
MULTIPROCESSORS, SCHEDULERS, CYCLES_PER_US, ISSUE_SHARE = 132, 4, 1755.0, 0.72


class Counts(NamedTuple):
    """Instructions of a thread; `loop` is the longest loop that holds no other, the one over a row's entries."""

    instructions: int
    barriers: int
    loop_instructions: int
    loop_barriers: int
    loop_shuffles: int
    loop_loads: str  # of global memory, by width in bits


def counts(cubin: bytes) -> Counts:
    """Counts of one kernel for an NVIDIA GPU."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            instructions.append(instruction[1])
    targets = [(labels.get(match[1]), end) for end, text in enumerate(instructions)
               if (match := re.match(r"BRA.*`\((\.L_x_\d+)\)", text))]  # fmt: skip
    loops = [(start, end + 1) for start, end in targets if start is not None and start < end]
    inner = [one for one in loops if not any(_holds(one, other) for other in loops)]
    loop = max((instructions[start:end] for start, end in inner), key=len, default=[])
    loads = [re.search(r"\.(128|64|U?16|U?8)(?=[. ])", text) for text in loop if text.startswith("LDG")]
    widths = [load[1].strip("U") if load else "32" for load in loads]
    return Counts(
        len(instructions) - _starting(instructions, "NOP"),
        _starting(instructions, "BAR"),
        len(loop),
        _starting(loop, "BAR"),
        _starting(loop, "SHFL", "REDUX"),
        " + ".join(f"{widths.count(width)} x {width}" for width in sorted(set(widths), key=int)),
    )


def _holds(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]


def _starting(instructions: Sequence[str], *names: str) -> int:
    return sum(text.startswith(names) for text in instructions)


THREADS = 256
TABLED = (
    "greedy", "rejection, saved sums", "rejection", "rejection, temperature", "rejection, temperatures and cutoffs",
    "point mass", "typical", "typical, sampled", "block", "coupled",
)  # fmt: skip
ROW_KERNELS = ("row_stats_kernel", "decide_kernel")
# What is estimated: K = 5 and V = 151,936 give 38 chunks and 149 pieces per row.
NUM_DRAFT_TOKENS, VOCAB_SIZE = 5, 151_936
# Cycles of an iteration that loads and reduces, and of one that only loads.
CHUNK_CYCLES, PIECE_CYCLES = 2000, 1500
# Of a launch, of testing the chain, and of merging the programs of a sequence.
LAUNCH_US, CHAIN_US, END_US = 1.5, 3.5, 1.8


class Grid(NamedTuple):
    """Programs of a launch, and iterations of the loop of each."""

    programs: int
    iterations: int


def _grids(batch_size: int, is_dense: bool, race: dict[str, Any]) -> tuple[Grid, Grid]:
    """Grids of the first and the last launch."""
    rows = batch_size * (NUM_DRAFT_TOKENS + 1 + NUM_DRAFT_TOKENS * is_dense)
    chunks = 1 if rows <= 24 else 2 if rows <= 192 else 4
    first = Grid(rows * -(-38 // chunks), chunks)
    pieces = -(-VOCAB_SIZE // race["loop_entries"])
    per_program = race["pieces_per_chunk"] * chunks if "pieces_per_chunk" in race else -(-pieces // (264 // batch_size))
    return first, Grid(batch_size * -(-pieces // per_program), per_program)


def _us(row: dict[str, Any], grid: Grid, cycles: int, fixed_us: float) -> float:
    """The longer of issuing all instructions and of the waves of programs one after another."""
    warps = THREADS // 32
    outside = row["instructions"] - row["loop_instructions"]
    issued = grid.programs * warps * (outside + grid.iterations * row["loop_instructions"])
    waves = -(-grid.programs // (MULTIPROCESSORS * min(8, 65536 // (THREADS * row["registers"]))))
    return max(issued / (MULTIPROCESSORS * SCHEDULERS * ISSUE_SHARE * CYCLES_PER_US),
               fixed_us + waves * grid.iterations * cycles / CYCLES_PER_US)  # fmt: skip


def estimates_us(rows: Sequence[dict[str, Any]], case: str, batch_size: int) -> tuple[float, float]:
    """Microseconds of both launches of a verification from a graph."""
    counted = [row for row in rows if row["case"] == case and "loop_entries" in row]
    stats, race = (next(row for row in counted if row["kernel"].startswith(kernel)) for kernel in ROW_KERNELS)
    first, last = _grids(batch_size, "saved" not in case, race)
    return _us(stats, first, CHUNK_CYCLES, LAUNCH_US), _us(race, last, PIECE_CYCLES, LAUNCH_US + CHAIN_US + END_US)


def comparison(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> str:
    """Tables of counts and of estimates, before and after a change of the kernels."""
    old = {(row["case"], row["kernel"].split()[0]): row for row in before}
    pairs = []
    for row in after:
        key = row["case"], row["kernel"].split()[0]
        reads_row = key[1] in ROW_KERNELS and "RACES=False FUSED" not in row["kernel"]
        if row["case"] in TABLED and reads_row and "loop_instructions" in row:
            pairs.append({"case": row["case"], "kernel": key[1], "old": old[key], "new": row})

    def both(cell: Any) -> Any:
        return lambda pair: f"{cell(pair['old'])} -> {cell(pair['new'])}"

    def per_thousand(name: str) -> Any:
        return lambda row: row[name] * 4096 // row["loop_entries"]

    counted = markdown({
        "call": lambda pair: pair["case"],
        "kernel": lambda pair: f"`{pair['kernel']}`",
        "registers": both(lambda row: row["registers"]),
        "instructions": both(per_thousand("loop_instructions")),
        "barriers": both(per_thousand("loop_barriers")),
        "shuffles": both(per_thousand("loop_shuffles")),
        "loads, bits": both(lambda row: row["loop_loads"]),
    }, pairs)  # fmt: skip
    cells = [{"case": case, "B": size, "us": [estimates_us(rows, case, size) for rows in (before, after)]}
             for case in ("rejection, saved sums", "rejection") for size in (1, 8, 32)]  # fmt: skip
    times = markdown({
        "call": lambda cell: cell["case"],
        "B": lambda cell: cell["B"],
        "first launch": lambda cell: " -> ".join(f"{first:.1f}" for first, _ in cell["us"]),
        "last launch": lambda cell: " -> ".join(f"{last:.1f}" for _, last in cell["us"]),
        "both": lambda cell: " -> ".join(f"{first + last:.1f}" for first, last in cell["us"]),
    }, cells)  # fmt: skip
    return f"""Machine instructions of a thread in the loop over a row, per 4,096 entries of the row, for cuda 90 and
bf16, before and after the race was cut down to one distribution and one reduction. With a temperature and a draft the
loop of the first launch holds the code of target rows and of draft rows, of which an iteration runs one.

{counted}

Estimated microseconds on an H200, before and after, for K = {NUM_DRAFT_TOKENS} and V = {VOCAB_SIZE:,}, from a CUDA
graph. These are not measurements: a launch takes the longer of issuing its counted instructions ({ISSUE_SHARE:.0%} of
the cycles) and of its waves of programs ({CHUNK_CYCLES:,} cycles per chunk, {PIECE_CYCLES:,} per piece of a race,
{LAUNCH_US} us per launch, {CHAIN_US} us to test the chain, {END_US} us to finish).

{times}

Made by `python benchmarks/kernel_builds.py`; every build is in `benchmarks/results/kernel_builds.json`."""
