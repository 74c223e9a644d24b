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
from hf_speculate.triton_kernels.kernels import launch

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# An H200: multiprocessors, schedulers of each, clock; and the share of cycles in which a scheduler issues.
MULTIPROCESSORS, SCHEDULERS, CYCLES_PER_US, ISSUE_SHARE = 132, 4, 1755.0, 0.72


class Counts(NamedTuple):
    """Instructions of a thread; `loop` is the loop over a row's entries.

    It is the first of the loops that load entries of half precision or vectors. A race that cannot be decided from
    bounds runs a later one; such loops are `rare`. The code in a loop that reads the last entries of a row by
    themselves is its `tail`, which is not counted with the loop.
    """

    instructions: int
    rare_instructions: int
    barriers: int
    tail_instructions: int
    loop_instructions: int
    loop_barriers: int
    loop_shuffles: int
    loop_loads: str  # of global memory, by width in bits
    waits: int  # for loads of global memory before the loop, one after another


def counts(cubin: bytes) -> Counts:
    """Counts of one kernel for an NVIDIA GPU."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    instructions, labels = [], dict[str, int]()
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            instructions.append(instruction[1])
    jumps = [(labels[match[1]], at) for at, text in enumerate(instructions)
             if (match := re.match(r"BRA.*`\((\.L_x_\d+)\)", text)) and match[1] in labels]  # fmt: skip
    loops = [(start, at + 1) for start, at in jumps if start < at]
    inner = sorted(one for one in loops if not any(_holds(one, other) for other in loops))
    widths = [_width_of_rows(instructions[start:end]) for start, end in inner]
    (start, end), *rare = [one for one, width in zip(inner, widths, strict=True) if width == max(widths)] or [(0, 0)]
    tail = _tail(instructions, [(at + 1, to) for to, at in jumps if start <= at < to <= end])
    loop = [instructions[at] for at in range(start, end) if at not in tail]
    return Counts(
        len(instructions) - _starting(instructions, "NOP"),
        sum(last - first for first, last in rare if max(widths) > 32),
        _starting(instructions, "BAR"),
        len(tail),
        len(loop),
        _starting(loop, "BAR"),
        _starting(loop, "SHFL", "REDUX"),
        " + ".join(
            f"{_load_widths(loop).count(width)} x {width}" for width in sorted(set(_load_widths(loop)), key=int)
        ),
        _waits(instructions[:start]),
    )


def _width_of_rows(loop: Sequence[str]) -> int:
    """Bits of the widest load; those of a vector if entries of half precision are loaded, which only rows hold."""
    widths = _load_widths(loop)
    return 128 if "16" in widths else max(map(int, widths), default=0)


def _tail(instructions: Sequence[str], skipped: Sequence[tuple[int, int]]) -> set[int]:
    """Places of the smallest of the `skipped` regions around each load of one entry that also load vectors."""
    tail: set[int] = set()
    for start, end in sorted(skipped, key=lambda region: region[1] - region[0]):
        widths = _load_widths(instructions[start:end])
        is_whole_chunk = _starting(instructions[start:end], "BAR") > 0
        if tail.isdisjoint(range(start, end)) and "128" in widths and len({*widths}) > 1 and not is_whole_chunk:
            tail.update(range(start, end))
    return tail


def _load_widths(instructions: Sequence[str]) -> list[str]:
    """Bits of every load of global memory."""
    loads = [re.search(r"\.(128|64|U?16|U?8)(?=[. ])", text) for text in instructions if text.startswith("LDG")]
    return [load[1].strip("U") if load else "32" for load in loads]


def _waits(instructions: Sequence[str]) -> int:
    """How often instructions in this order stop for loads: the longest chain of loads that wait for one another."""
    num_waits, arrivals = 0, dict[int, int]()  # by register, how many waits end with its load
    for text in instructions:
        registers = [(int(match[1]), ".64" in match[2]) for match in re.finditer(r"\bR(\d+)((?:\.\w+)*)", text)]
        used = {number + half for number, is_pair in registers for half in range(1 + is_pair)}
        num_waits = max([num_waits, *(arrivals.get(number, 0) for number in used)])
        if text.startswith(("LDG.", "ATOM")):  # not LDGSTS, which loads into shared memory
            words = max(1, int(_load_widths([text.replace("ATOM", "LDG")])[0]) // 32)
            arrivals |= {registers[0][0] + word: num_waits + 1 for word in range(words)}
    return num_waits


def _holds(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]


def _starting(instructions: Sequence[str], *names: str) -> int:
    return sum(text.startswith(names) for text in instructions)


SHIFTED_VOCAB_SIZE = 50_257
SHIFTED = f", V = {SHIFTED_VOCAB_SIZE:,}"  # ends the names of calls with rows that start anywhere
TABLED = (
    "greedy", "rejection, saved sums", "rejection", "rejection, temperature", "rejection, temperatures and cutoffs",
    "point mass", "typical", "typical, sampled", "block", "coupled",
)  # fmt: skip
ROW_KERNELS = ("row_stats_kernel", "decide_kernel")
# Kernels of these calls are tabled for rows that start anywhere. In float32, entries that were loaded one by one cannot
# be told from other loads, but the loops of these kernels have no others.
SHIFTED_TABLED = {
    "bf16": ("greedy", "rejection, saved sums", "rejection, temperatures and cutoffs", "point mass", "typical",
             "typical, sampled", "block, saved sums", "coupled", "cut"),
    "float32": ("greedy", "rejection, saved sums", "rejection, temperature", "block, saved sums", "coupled", "cut"),
}  # fmt: skip
SHIFTED_KERNELS = {
    "bf16": (*ROW_KERNELS, "entropies_kernel", "block_masses_kernel", "cut_kernel"),
    "float32": ("row_stats_kernel", "block_masses_kernel", "cut_kernel"),
}
# What is estimated: K = 5 and V = 151,936 give 38 chunks and 149 pieces per row.
NUM_DRAFT_TOKENS, VOCAB_SIZE = 5, 151_936
# Cycles of an iteration that loads and reduces, and of one that only loads.
CHUNK_CYCLES, PIECE_CYCLES = 2000, 1500
# Of a launch, of testing the chain, and of merging the programs of a sequence. CHAIN_US is that of a kernel that waits
# CHAIN_WAITS times for memory before its race, and is scaled with the waits of others.
LAUNCH_US, CHAIN_US, CHAIN_WAITS, END_US = 1.5, 3.5, 9, 1.8
BYTES_PER_US = 4.3e6  # the copy rate of an H200
LOGIT_BYTES = 2


class Grid(NamedTuple):
    """Programs of a launch, iterations of the loop of each, and rows of logits that all read."""

    programs: int
    iterations: int
    rows: int


def _grids(batch_size: int, is_dense: bool, race: dict[str, Any]) -> tuple[Grid, Grid]:
    """Grids of the first and the last launch."""
    rows = batch_size * (NUM_DRAFT_TOKENS + 1 + NUM_DRAFT_TOKENS * is_dense)
    chunks = launch.chunks_per_program(rows)
    pieces = -(-VOCAB_SIZE // race["loop_entries"])
    is_old = "pieces_per_chunk" in race
    per_program = race["pieces_per_chunk"] * chunks if is_old else launch.pieces_per_program(batch_size, pieces)
    first = Grid(rows * -(-38 // chunks), chunks, rows)
    return first, Grid(batch_size * -(-pieces // per_program), per_program, 2 * batch_size)


def _us(row: dict[str, Any], grid: Grid, cycles: int, fixed_us: float) -> float:
    """The longest of issuing all instructions, the waves of programs one after another, and reading all rows."""
    warps = row["num_warps"]
    outside = row["instructions"] - row["loop_instructions"] - row.get("rare_instructions", 0)
    issued = grid.programs * warps * (outside + grid.iterations * row["loop_instructions"])
    resident = min(64 // warps, 32, 65536 // (32 * warps * row["registers"]))
    waves = -(-grid.programs // (MULTIPROCESSORS * resident))
    return max(issued / (MULTIPROCESSORS * SCHEDULERS * ISSUE_SHARE * CYCLES_PER_US),
               fixed_us + waves * grid.iterations * cycles / CYCLES_PER_US,
               LAUNCH_US + grid.rows * VOCAB_SIZE * LOGIT_BYTES / BYTES_PER_US)  # fmt: skip


def estimates_us(rows: Sequence[dict[str, Any]], case: str, batch_size: int) -> tuple[float, float]:
    """Microseconds of both launches of a verification from a graph."""
    counted = [row for row in rows if row["case"] == case and "loop_entries" in row]
    stats, race = (next(row for row in counted if row["kernel"].startswith(kernel)) for kernel in ROW_KERNELS)
    first, last = _grids(batch_size, "saved" not in case, race)
    chain_us = CHAIN_US * race.get("waits", CHAIN_WAITS) / CHAIN_WAITS
    return _us(stats, first, CHUNK_CYCLES, LAUNCH_US), _us(race, last, PIECE_CYCLES, LAUNCH_US + chain_us + END_US)


def comparison(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> str:
    """Tables of counts and of estimates, before and after a change of the kernels."""

    def key(row: dict[str, Any]) -> tuple[str, str, str]:
        return row["case"], row["kernel"].split()[0], row["dtype"]

    old = {key(row): row for row in before}
    counted = [row for row in after if "loop_instructions" in row and "RACES=False FUSED" not in row["kernel"]]
    aligned = [row for row in counted if row["case"] in TABLED and key(row)[1:] in {(k, "bf16") for k in ROW_KERNELS}]
    shifted = [row for row in counted if row["case"].removesuffix(SHIFTED) in SHIFTED_TABLED[row["dtype"]]
               and row["case"].endswith(SHIFTED) and key(row)[1] in SHIFTED_KERNELS[row["dtype"]]]  # fmt: skip

    def both(cell: Any) -> Any:
        return lambda row: f"{cell(old[key(row)])} -> {cell(row)}"

    def per_thousand(name: str) -> Any:
        return lambda row: row[name] * 4096 * row["num_warps"] // (row["loop_entries"] * 8)

    columns = {
        "call": lambda row: row["case"].removesuffix(SHIFTED),
        "kernel": lambda row: f"`{key(row)[1]}`",
        "registers": both(lambda row: row["registers"]),
        "instructions": both(per_thousand("loop_instructions")),
    }
    loads = {"loads, bits": both(lambda row: row["loop_loads"])}
    reductions = {"barriers": both(per_thousand("loop_barriers")), "shuffles": both(per_thousand("loop_shuffles"))}
    aligned_table = markdown({**columns, **reductions, **loads, "waits": lambda row: row["waits"]}, aligned)
    shifted_table = markdown({**columns, **loads, "dtype": lambda row: row["dtype"],
                              "row end": lambda row: row["tail_instructions"]}, shifted)  # fmt: skip
    before, after = ([row for row in rows if row["dtype"] == "bf16"] for rows in (before, after))
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
bf16, as if eight warps shared these. Before, a race reduced every piece of 512 entries twice. After, every thread keeps
the entry with the largest upper bound of its key, and computes the keys of these entries only. Left out is the loop
that computes all keys, which runs if another bound exceeds the best key: in 0.1 % of the programs of simulated rows.
With a temperature and a draft the loop of the first launch holds the code of target rows and of draft rows, of which an
iteration runs one. Waits are loads before the loop that wait for one another.

{aligned_table}

The same of rows that start at any address, as those of V = {SHIFTED_VOCAB_SIZE:,}. Before, they were read one entry at
a time. After, they are read by vectors of 16 bytes, each of them twice, because an aligned vector holds entries of two
threads. The code for the end of a row is left out of instructions and loads. It has as many instructions as the last
column says, and only the last chunk of a row runs it.

{shifted_table}

Estimated microseconds on an H200, before and after, for K = {NUM_DRAFT_TOKENS} and V = {VOCAB_SIZE:,}, from a CUDA
graph. These are not measurements: a launch takes the longest of issuing its counted instructions ({ISSUE_SHARE:.0%} of
the cycles), of its waves of programs ({CHUNK_CYCLES:,} cycles per chunk, {PIECE_CYCLES:,} per piece of a race,
{LAUNCH_US} us per launch, {CHAIN_US} us per {CHAIN_WAITS} waits to test the chain, {END_US} us to finish), and of
reading its rows ({BYTES_PER_US / 1e6} TB/s).

{times}

Made by `python benchmarks/kernel_builds.py`; every build is in `benchmarks/results/kernel_builds.json`."""
