"""Compare every verifier with transformers, textbook code in eager torch, and FlashInfer.

    python benchmarks/verifiers.py                           # a default for the machine
    python benchmarks/verifiers.py --batch-sizes 1 8 --num-draft-tokens 5 --dtypes float32
    python benchmarks/verifiers.py --table                   # print the last results as a table
    python benchmarks/verifiers.py --readme docs/kernels.md  # write this table into the file

All methods alternate in one process. The output of each method is checked before it is timed, see
`_exactness`; a failed check stops the run. The timed code starts from raw logits and includes
temperature and top-k (in hf_speculate, finding the cutoffs). transformers verifies one row at a
time, so a batch is a loop.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from _exactness import check, control
from _harness import (
    ROOT,
    alternate,
    alternate_patiently,
    copy_rate,
    read_results,
    result_name,
    settle_allocator,
    speedups,
    spread,
    wait,
    write_between,
    write_results,
)
from _report import as_table, plot, summary
from _rounds import Round, Warp, cutoffs, make_logits, make_round, overlap, warped
from _verifiers import VERIFIERS, Run, Verifier, captured, methods_of
from tqdm import tqdm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BATCH_SIZES, NUM_DRAFT_TOKENS, VOCAB_SIZES = (
    (1, 4, 16, 64, 128),
    (3, 5, 8),
    (151_936, 128_256, 32_000),
)
# On a CPU, sizes suit a laptop and take under ten minutes on two cores.
CPU_BATCH_SIZES, CPU_NUM_DRAFT_TOKENS, CPU_VOCAB_SIZES = (1, 8), (5,), (151_936, 32_000)
MIN_REPEATS = 5
# On a GPU, the logits of a round are read from memory, not from the cache.
GPU_WORKING_SET_BYTES, MAX_ROUNDS = 1 << 28, 64
# Most float32 copies of a round's logits that a method holds at once (textbook block verification).
NUM_FLOAT_COPIES = 6
# These methods build or compile other libraries' code in their first call. The values are the
# errors of failed builds.
MAY_FAIL = {"ours, compiled": RuntimeError, "flashinfer": (ImportError, RuntimeError)}

Shape = tuple[str, int, int, int]  # dtype, B, K, V


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    return list(
        itertools.product(args.dtypes, args.batch_sizes, args.num_draft_tokens, args.vocab_sizes)
    )


def left_out_of(shapes: list[Shape]) -> str | None:
    """Describe the part of the full grid that `shapes` omits."""
    axes = zip(
        ("dtypes", "batch sizes", "drafted tokens", "vocabularies"),
        (tuple(DTYPES), BATCH_SIZES, NUM_DRAFT_TOKENS, VOCAB_SIZES),
        zip(*shapes, strict=True),
        strict=True,
    )
    parts = [
        f"{name} {', '.join(map(str, missing))}"
        for name, full, taken in axes
        if (missing := [method for method in full if method not in taken])
    ]
    return "; ".join(parts) or None


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in (
        Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    ):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 << 30


def needed_bytes(shape: Shape) -> int:
    dtype, batch_size, num_draft_tokens, vocab_size = shape
    rows = batch_size * (2 * num_draft_tokens + 1)
    return rows * vocab_size * (3 * DTYPES[dtype].itemsize + 4 * NUM_FLOAT_COPIES)


def make_rounds(shape: Shape, warp: Warp, how: str, device: torch.device) -> list[Round]:
    """Make one round on a CPU, or on a GPU as many rounds as exceed its cache."""
    dtype, *sizes = shape
    round_bytes = sizes[0] * (2 * sizes[1] + 1) * sizes[2] * DTYPES[dtype].itemsize
    count = (
        min(-(-GPU_WORKING_SET_BYTES // round_bytes), MAX_ROUNDS) if device.type == "cuda" else 1
    )
    rounds = []
    for seed in range(count):
        target, draft = (
            logits.to(DTYPES[dtype]) for logits in make_logits(tuple(sizes), device, seed)
        )
        rounds.append(make_round(target, draft, warp, how))
    return rounds


def check_cutoffs(round_: Round) -> None:
    """Stop unless the cutoffs keep exactly the same entries as top-k in transformers."""
    if round_.warp.top_k is None:
        return
    logits = round_.target_logits
    below = logits.to(torch.float32) / round_.warp.temperature < cutoffs(
        logits, round_.warp
    ).unsqueeze(-1)
    if not torch.equal(below, warped(logits, round_.warp) == -torch.inf):
        raise SystemExit("the cutoffs drop other entries than top-k does")


def accepted_of(run: Run, rounds: list[Round]) -> float:
    """Return the mean number of accepted tokens per row."""
    return torch.cat([(run(round_) >= 0).sum(-1) - 1 for round_ in rounds]).float().mean().item()


def timed(
    methods: dict[str, Run], rounds: list[Round], args: argparse.Namespace, name: str
) -> tuple[dict[str, list[float]], int]:
    """Return the seconds per round by method, and the number of runs delayed by other processes."""
    fresh = [round_.target_logits.clone() for round_ in rounds]

    def restore() -> None:  # as a forward would: transformers processes float32 logits in place
        for round_, logits in zip(rounds, fresh, strict=True):
            round_.target_logits.copy_(logits)

    calls: dict[str, Any] = {
        method: lambda run=run: [run(round_) for round_ in rounds]
        for method, run in methods.items()
    }
    if "ours, triton" in methods:
        try:
            calls["ours, triton, graph"] = captured(methods["ours, triton"], rounds)
        except RuntimeError as error:
            tqdm.write(
                f"left out: ours, triton, graph for {name}: {str(error).strip().splitlines()[0]}"
            )
    alternate(calls, 1, name, restore)  # compiles code and allocates memory
    once = sum(values[0] for values in alternate(calls, 1, name, restore).values())
    repeats = max(MIN_REPEATS, min(args.repeats, int(args.cell_seconds / once)))
    seconds, num_held_up = alternate_patiently(calls, repeats, name, restore, args.patience)
    return {
        method: [value / len(rounds) for value in values] for method, values in seconds.items()
    }, num_held_up


def measure(
    name: str, warp: Warp, shape: Shape, methods: dict[str, Run], args: argparse.Namespace
) -> dict[str, Any]:
    """Measure one cell of the results."""
    dtype, batch_size, num_draft_tokens, vocab_size = shape
    verifier = VERIFIERS[name]
    rounds = make_rounds(shape, warp, verifier.drafts, args.device)
    check_cutoffs(rounds[0])
    row: dict[str, Any] = {
        "verifier": name,
        "logits": warp.name,
        "dtype": dtype,
        "batch_size": batch_size,
        "num_draft_tokens": num_draft_tokens,
        "vocab_size": vocab_size,
        "drafts": verifier.drafts,
        "overlap": round(overlap(rounds[0]), 3),
        "transformers_is": verifier.theirs_is,
    }
    if name != "sample":
        row["num_accepted"] = round(accepted_of(methods["ours, torch"], rounds), 2)
    seconds, num_held_up = timed(
        methods, rounds, args, f"{name}, {dtype}, B = {batch_size}, V = {vocab_size}"
    )
    moved = (
        batch_size * verifier.num_rows_read(num_draft_tokens) * vocab_size * DTYPES[dtype].itemsize
    )
    row["bytes"] = moved
    row["repeats"], row["num_held_up"] = len(seconds["transformers"]), num_held_up
    row["seconds"] = {method: spread(values) for method, values in seconds.items()}
    row["over_transformers"] = {
        method: speedups(seconds["transformers"], values)
        for method, values in seconds.items()
        if method != "transformers"
    }
    row["gb_per_s"] = {
        method: moved / spread(values)["median"] / 1e9 for method, values in seconds.items()
    }
    row["share_of_copy_rate"] = {
        method: rate * 1e9 / args.copy_rate for method, rate in row["gb_per_s"].items()
    }
    return row


def checked_methods(
    name: str, verifier: Verifier, args: argparse.Namespace, reported: set[str]
) -> dict[str, Run]:
    """Return the checked methods to time, and report each method that cannot run, once."""
    methods, left_out = methods_of(verifier, args.device, args.compile)
    for method in list(methods):
        try:
            for warp in verifier.warps:
                check(verifier, method, methods[method], warp, args.device)
        except MAY_FAIL.get(method, ImportError) as error:
            left_out[method] = f"does not work for {name}: {str(error).strip().splitlines()[0]}"
            del methods[method]
    if verifier.rule == "rejection":
        control(verifier, args.device)
    for method, reason in left_out.items():
        if (line := f"left out: {method} {reason}") not in reported:
            reported.add(line)
            print(line, flush=True)
    return methods


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    begin = time.perf_counter()
    shapes = shapes_of(args)
    if left_out := left_out_of(shapes):
        print(f"left out of the grid: {left_out}")
    reported: set[str] = set()
    threads = args.threads or torch.get_num_threads()
    # Small operations gain nothing from threads, which wait for one another on a busy machine.
    torch.set_num_threads(1)
    names = tqdm(args.verifiers, desc="checking outputs", leave=False, disable=None)
    methods = {name: checked_methods(name, VERIFIERS[name], args, reported) for name in names}
    print(f"checks passed: {', '.join(methods)} ({time.perf_counter() - begin:.0f} s)")
    torch.set_num_threads(threads)
    settle_allocator()
    args.copy_rate = copy_rate(args.device)
    print(f"copy rate {args.copy_rate / 1e9:.1f} GB/s, read and written")
    cells = [
        (shape, name, warp)
        for shape in shapes
        for name in args.verifiers
        for warp in VERIFIERS[name].warps
        if (warp.top_k is None) in [logits == "plain" for logits in args.logits]
        or len(VERIFIERS[name].warps) == 1
    ]
    rows: list[dict[str, Any]] = []
    for shape, name, warp in tqdm(cells, desc="cells", leave=False, disable=None):
        if args.limit_s and time.perf_counter() - begin > args.limit_s:
            tqdm.write(
                f"left out: {len(cells) - len(rows)} cells after {args.limit_s} s, from {shape} "
                f"{name} on"
            )
            break
        if needed_bytes(shape) > free_bytes(args.device):
            line = f"left out: {shape}, needs {needed_bytes(shape) / 1e9:.0f} GB"
            if line not in reported:
                reported.add(line)
                tqdm.write(line)
            continue
        with torch.no_grad():
            rows.append(measure(name, warp, shape, methods[name], args))
        write_results(result_name("verifiers", args.device), args, rows)
        wait()
        tqdm.write(summary(rows[-1]))
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-sizes", nargs="+", type=int)
    parser.add_argument("--num-draft-tokens", nargs="+", type=int)
    parser.add_argument("--vocab-sizes", nargs="+", type=int)
    parser.add_argument(
        "--dtypes", nargs="+", choices=sorted(DTYPES), default=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--verifiers", nargs="+", choices=sorted(VERIFIERS), default=list(VERIFIERS)
    )
    parser.add_argument(
        "--logits", nargs="+", choices=["plain", "warped"], default=["warped", "plain"]
    )
    parser.add_argument(
        "--threads", type=int, help="of torch, on a CPU; its own choice unless given"
    )
    parser.add_argument(
        "--repeats", type=int, default=25, help="runs of each method in a cell, at most"
    )
    parser.add_argument(
        "--cell-seconds", type=float, default=2.5, help="fewer runs where a cell would take longer"
    )
    parser.add_argument(
        "--patience", type=int, default=10, help="new tries for a run held up by other processes"
    )
    parser.add_argument("--limit-s", type=float, help="begin no cell after this; 540 unless given")
    parser.add_argument("--full", action="store_true", help="the full grid on a CPU too")
    parser.add_argument(
        "--compile", action="store_true", help="time torch.compile of the torch backend as well"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the last results as a table, measure nothing"
    )
    parser.add_argument(
        "--readme", type=Path, help="write the table into this file, measure nothing"
    )
    args = parser.parse_args()
    args.device = torch.device(args.device)
    is_small = args.device.type == "cpu" and not args.full
    args.batch_sizes = args.batch_sizes or (CPU_BATCH_SIZES if is_small else BATCH_SIZES)
    args.num_draft_tokens = args.num_draft_tokens or (
        CPU_NUM_DRAFT_TOKENS if is_small else NUM_DRAFT_TOKENS
    )
    args.vocab_sizes = args.vocab_sizes or (CPU_VOCAB_SIZES if is_small else VOCAB_SIZES)
    args.limit_s = args.limit_s or 540.0
    return args


def main() -> None:
    args = parse()
    transformers.logging.set_verbosity_error()
    if args.table or args.readme:
        table = as_table(read_results("verifiers"))
        if args.readme:
            write_between(args.readme, "verifiers", table)
        else:
            print(table)
        return
    rows = run(args)
    print(
        "written to "
        f"{write_results(result_name('verifiers', args.device), args, rows).relative_to(ROOT)}"
    )
    if args.device.type == "cpu" and (path := plot(read_results("verifiers"))):
        print(f"drawn in {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
