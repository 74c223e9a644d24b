"""Compile every Triton kernel for several GPUs and count registers, spills and shared memory.

The script needs no GPU. It fails if a kernel spills on cuda 90, if an attention kernel spills on
any target, or if shared memory exceeds the limit of a target. A complete run also writes a table of
all kernels to docs/kernels.md.
"""

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._harness import ROOT, markdown, write_between, write_results
from hf_speculate.kernels import NoiseKeys, Stream
from hf_speculate.kernels._inputs import (
    Attention,
    Cut,
    Proposal,
    Round,
    TypicalRule,
    Warp,
    WarpedDraw,
)
from hf_speculate.kernels.kernels import attention_launch, launch, operations


class Target(NamedTuple):
    """GPU to compile for."""

    gpu: GPUTarget
    shared_limit_bytes: int  # limit for one block
    has_atomics: bool  # whether the single-launch variant runs there
    vocab_sizes: Sequence[int]
    has_attention: bool = True  # whether attention for few queries runs there


# All rows start at multiples of 16 bytes. One target of each compiler also compiles for rows that
# start anywhere.
SHIFTED_VOCAB_SIZE = 50_257
SHIFTED = f", V = {SHIFTED_VOCAB_SIZE:,}"  # suffix for names of calls with unaligned rows
EVEN = (8192,)
ALL = (8192, SHIFTED_VOCAB_SIZE)
TARGETS = {
    "cuda 80": Target(GPUTarget("cuda", 80, 32), 163 * 1024, True, EVEN),
    "cuda 90": Target(GPUTarget("cuda", 90, 32), 227 * 1024, True, ALL),
    "cuda 100": Target(GPUTarget("cuda", 100, 32), 227 * 1024, True, EVEN, False),
    "cuda 120": Target(GPUTarget("cuda", 120, 32), 99 * 1024, True, ()),  # attention alone
    "hip gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024, False, ALL, False),
}
NO_SPILLS = ("cuda 90",)
# Attention must not spill anywhere. The entries are head widths and numbers of tokens for groups of
# 4 heads, which cover each width and each tile of rows.
ATTENTION = "attention"  # prefix for names of attention calls
ATTENTION_SHAPES = {
    torch.bfloat16: ((64, 16), (80, 16), (96, 16), (128, 1), (128, 6), (128, 16), (256, 6)),
    torch.float32: ((96, 6), (256, 6)),
}
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
TYPE_NAMES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


class Build(NamedTuple):
    """One kernel with the types and constants of a launch."""

    case: str  # the first call that launches it
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]  # compiler options
    aligned: tuple[str, ...]  # arguments divisible by 16

    @property
    def name(self) -> str:
        """Name of the kernel, and the constants that select its variant."""
        flags = [
            f"{key}={value}"
            for key, value in self.constants.items()
            if value is not None and key.isupper()
        ]
        left_out = [
            key.removesuffix("_ptr") for key, value in self.constants.items() if value is None
        ]
        return " ".join(
            [self.kernel.__name__, *flags, *(["without", *left_out] if left_out else [])]
        )


def build_of(case: str, kernel: Any, arguments: dict[str, Any], **options: int) -> Build:
    """Return the build for a launch with `arguments`, ignoring arguments of other kernels."""
    signature, constants = {}, {}
    for name in kernel.arg_names:
        value = arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name] = TYPE_NAMES[value.dtype]
        elif value is None or name.isupper():
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    # Triton specialises all integers on divisibility, unless the kernel excludes them.
    strides = [
        name
        for name in signature
        if name.startswith(("key_stride", "value_stride")) and not arguments[name] % 16
    ]
    pointers = [name for name, dtype in signature.items() if dtype.startswith("*")]
    return Build(case, kernel, signature, constants, options, (*pointers, *strides))


def builds(dtype: torch.dtype, target: Target) -> Iterator[Build]:
    """Yield every build that the launches need, once."""
    recorded = [
        launches(dtype, target.has_atomics, vocab_size) for vocab_size in target.vocab_sizes
    ]
    if target.has_attention:
        recorded.append(attention_launches(dtype))
    seen = set()
    for build in chain.from_iterable(recorded):
        key = (build.name, *build.signature.values())
        if key not in seen:
            seen.add(key)
            yield build


def launches(dtype: torch.dtype, has_atomics: bool, vocab_size: int) -> list[Build]:
    """Record every launch of every operation, with all options in use, without running them."""
    recorded: list[Build] = []
    case = ""
    suffix = SHIFTED if vocab_size == SHIFTED_VOCAB_SIZE else ""

    def record(self: launch.Launch, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        recorded.append(
            build_of(case + suffix, kernel, self.shared | arguments, num_warps=launch.NUM_WARPS)
        )

    batch_size, num_draft_tokens = 2, 3
    target = torch.zeros(batch_size, num_draft_tokens + 1, vocab_size, dtype=dtype)
    lens = torch.zeros(batch_size, dtype=torch.int32)
    keys = NoiseKeys(*(torch.zeros(batch_size, dtype=torch.int64) for _ in range(3)))
    round_ = Round(target, torch.zeros(batch_size, num_draft_tokens, dtype=torch.int64), lens)
    warp = Warp(torch.ones(batch_size), torch.zeros(batch_size, num_draft_tokens + 1))
    draft = target[:, 1:].contiguous()
    saved = Proposal(draft, torch.zeros(batch_size, num_draft_tokens))
    plain, dense = Warp(), saved._replace(logsumexp=None)
    cases: dict[str, Callable[[], Any]] = {
        "greedy": lambda: operations.greedy(round_),
        "rejection, saved sums": lambda: operations.reject(round_, plain, saved, keys),
        "rejection": lambda: operations.reject(round_, plain, dense, keys),
        "rejection, temperature": lambda: operations.reject(round_, Warp(0.7), dense, keys),
        "rejection, saved sums, temperatures and cutoffs": lambda: operations.reject(
            round_, warp, saved, keys
        ),
        "rejection, temperatures and cutoffs": lambda: operations.reject(round_, warp, dense, keys),
        "rejection, two dtypes": lambda: operations.reject(
            round_, plain, dense._replace(logits=draft.half()), keys
        ),
        "rejection, every test": lambda: operations.reject_and_test(round_, dense, keys),
        "point mass": lambda: operations.reject(round_, plain, None, keys),
        "point mass, temperatures and cutoffs": lambda: operations.reject(round_, warp, None, keys),
        "typical": lambda: operations.typical(
            round_, warp, TypicalRule(0.09, 0.3, 0.0, False), keys
        ),
        "typical, sampled": lambda: operations.typical(
            round_, warp, TypicalRule(0.09, 0.3, 1e-5, True), keys
        ),
        "block, saved sums": lambda: operations.block(round_, warp, saved, keys),
        "block": lambda: operations.block(round_, warp, dense, keys),
        "coupled": lambda: operations.coupled(round_, warp, keys),
        "sample": lambda: operations.sample(
            target[:, 0], Warp(warp.temperature, lens.float()), keys, Stream.DRAFT
        ),
        "cut": lambda: operations.cut(target[:, 0], 1.0, Cut(50, 0.9, 3.0)),
        "cut, temperature": lambda: operations.cut(target[:, 0], 0.7, Cut(50, 0.9, 3.0)),
    }
    if has_atomics:
        memory = WarpedDraw(
            torch.zeros(batch_size, dtype=torch.int64),
            torch.zeros(batch_size),
            target[:, 0].float(),
        )
        for name, temperature in ("warped draw", 1.0), ("warped draw, temperature", 0.7):
            cases[name] = partial(
                operations.cut_and_draw,
                target[:, 0],
                temperature,
                Cut(50, 0.9, 3.0),
                keys,
                Stream.DRAFT,
                0,
                memory,
            )
    run, operations_has_atomics = launch.Launch.run, operations.has_atomics
    try:
        launch.Launch.run = record  # type: ignore[method-assign]
        operations.has_atomics = lambda device: has_atomics
        for case, call in cases.items():  # noqa: B007, `record` reads it
            call()
    finally:
        launch.Launch.run = run  # type: ignore[method-assign]
        operations.has_atomics = operations_has_atomics
    return recorded


def attention_launches(dtype: torch.dtype) -> list[Build]:
    """Record launches of attention for few queries without running them.

    The small kernels are recorded only in bfloat16.
    """
    recorded: list[Build] = []
    case = ""

    def record(
        device: torch.device, kernel: Any, grid: Any, arguments: dict[str, Any], **options: int
    ) -> None:
        if kernel is attention_launch.attend_kernel or "widest" in case:
            recorded.append(build_of(case, kernel, arguments, **options))

    def attend(width: int, num_query: int, **arguments: Any) -> None:
        query = torch.zeros(1, 8, num_query, width, dtype=dtype)
        key = torch.zeros(1, 2, 64, width, dtype=dtype)
        spans = attention_launch.key_spans(query.new_zeros(1, 1, num_query, 64))
        attention_launch.attend(Attention(query, key, key, spans, **arguments))

    run = attention_launch.launched
    try:
        attention_launch.launched = record
        for width, num_query in ATTENTION_SHAPES[dtype]:
            case = f"{ATTENTION}, {num_query} tokens, heads of {width}"
            attend(width, num_query)
        if dtype == torch.bfloat16:
            case = f"{ATTENTION}, widest heads"
            attend(256, 6)
            case = f"{ATTENTION}, widest heads, capped, with sinks"
            attend(256, 6, softcap=50.0, sinks=torch.zeros(8))
    finally:
        attention_launch.launched = run
    return recorded


def compile_one(job: tuple[str, str, int]) -> dict[str, Any]:
    """Compile launch number `job[2]` with dtype `job[1]` for target `job[0]`."""
    target_name, dtype_name, number = job
    target = TARGETS[target_name]
    build = list(builds(DTYPES[dtype_name], target))[number]
    indices = {name: index for index, name in enumerate(build.kernel.arg_names)}
    aligned = {(indices[name],): [["tt.divisibility", 16]] for name in build.aligned}
    source = ASTSource(build.kernel, build.signature, build.constants, aligned)
    compiled = triton.compile(source, target=target.gpu, options=build.options)
    is_cuda = target.gpu.backend == "cuda"
    used = (
        cuda_usage(compiled.asm["ptx"], target.gpu.arch)
        if is_cuda
        else hip_usage(compiled.asm["amdgcn"])
    )
    return {
        "case": build.case,
        "kernel": build.name,
        "dtype": dtype_name,
        "target": target_name,
        **used,
        "shared_bytes": compiled.metadata.shared,
        "shared_limit_bytes": target.shared_limit_bytes,
        "num_warps": build.options["num_warps"],
    }


def cuda_usage(ptx: str, arch: int) -> dict[str, Any]:
    """Return registers per thread and spilled bytes, as reported by Triton's assembler."""
    assembler = get_ptxas(arch).path
    architecture = re.search(r"\.target (\S+?)[,\s]", ptx)
    if architecture is None:
        raise ValueError("the PTX names no target")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "kernel.ptx")
        path.write_text(ptx)
        command = [
            assembler,
            "-v",
            "--regAllocOptLevel=2",
            f"--gpu-name={architecture[1]}",
            path,
            "-o",
            path.with_suffix(".cubin"),
        ]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    if spills is None or registers is None:
        raise ValueError(f"{assembler} said nothing of registers: {log}")
    return {"registers": int(registers[1]), "spills": int(spills[1]) + int(spills[2])}


def hip_usage(assembly: str) -> dict[str, Any]:
    """Return vector registers per thread and spilled registers, from the assembly metadata."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    if spills is None or registers is None:
        raise ValueError("the assembly says nothing of registers")
    return {"registers": int(registers[1]), "spills": int(spills[1])}


def problems(row: dict[str, Any]) -> Iterator[str]:
    """Yield the problems in one build."""
    where = f"{row['kernel']} ({row['dtype']}, {row['target']})"
    if row["spills"] and (row["target"] in NO_SPILLS or row["case"].startswith(ATTENTION)):
        yield f"{where}: {row['spills']} bytes of registers spilled"
    if row["shared_bytes"] > row["shared_limit_bytes"]:
        limit = row["shared_limit_bytes"]
        yield f"{where}: {row['shared_bytes']} bytes of shared memory, the limit is {limit}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format one line per kernel, with maximum registers and spills over its builds by target."""

    def name_of(row: dict[str, Any]) -> str:
        return str(row["kernel"].split()[0])

    def max_registers(target: str, builds: Sequence[dict[str, Any]]) -> str:
        of_target = [row for row in builds if row["target"] == target]
        if not of_target:
            return "-"
        spills = max(row["spills"] for row in of_target)
        return f"{max(row['registers'] for row in of_target)}" + (
            f" ({spills} spilled)" if spills else ""
        )

    lines = [
        {"kernel": f"`{name}`", "builds": list(builds)}
        for name, builds in groupby(sorted(rows, key=name_of), key=name_of)
    ]
    columns: dict[str, Callable[[dict[str, Any]], Any]] = {
        "kernel": lambda line: line["kernel"],
        "builds": lambda line: len(line["builds"]),
        **{
            target: lambda line, target=target: max_registers(target, line["builds"])
            for target in TARGETS
        },
        "shared bytes": lambda line: max(row["shared_bytes"] for row in line["builds"]),
    }
    return f"""\
Maximal registers per thread over the builds of a kernel, by target, and maximal spills: bytes on
cuda, registers on hip. The last column is the maximal shared memory of a program.

{markdown(columns, lines)}

Made by `python benchmarks/kernel_builds.py`; every build is in
`benchmarks/results/kernel_builds.json`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--kernel", default="", help="only kernels with this in their name")
    args = parser.parse_args()
    jobs = [
        (target, dtype, number)
        for target in args.targets
        for dtype in args.dtypes
        for number, build in enumerate(builds(DTYPES[dtype], TARGETS[target]))
        if args.kernel in build.name
    ]
    # Forked workers would inherit locks from the Triton compiler.
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        rows = list(tqdm(pool.map(compile_one, jobs), total=len(jobs), desc="kernels"))
    for row in rows:
        print(
            f"{row['target']:11} {row['dtype']:8} {row['registers']:4} registers "
            f"{row['spills']:4} spilled {row['shared_bytes']:6} bytes shared  {row['kernel']}"
        )
    all_problems = [problem for row in rows for problem in problems(row)]
    if not args.kernel and args.targets == list(TARGETS) and args.dtypes == list(DTYPES):
        print(f"written to {write_results('kernel_builds', args, rows)}")
        write_between(ROOT / "docs" / "kernels.md", "kernel-builds", table(rows))
    for problem in all_problems:
        print(problem, file=sys.stderr)
    print(f"{len(rows)} builds, {len(all_problems)} problems")
    return 1 if all_problems else 0


if __name__ == "__main__":
    sys.exit(main())
