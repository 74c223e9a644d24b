"""Measure the first compiled calls of a process, with and without torch's disk caches.

    python benchmarks/compilation.py

A method decodes the bundled prompts with one row, with several rows, with another number of rows,
and with longer texts. Each method runs in separate processes: the first ones start with empty cache
folders, and the others with filled ones.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from _engines import DEFAULT, PLAIN_COMPILED, Runner, compiled
from _harness import ROOT, Results, add_common_arguments, markdown, parse_common
from _subjects import DTYPES, load_pair
from torch._dynamo.utils import counters
from tqdm import tqdm

NAME = "compilation"
METHODS = {"plain": PLAIN_COMPILED, "ours": compiled(DEFAULT)}
# Rows and new tokens of the calls, in order. The first two calls compile; the others must reuse
# their graphs.
CALLS = ((8, 64), (1, 64), (4, 64), (8, 256), (1, 256))
NUM_COMPILING = 2
NUM_AFTER = 3  # number of calls of each kind after compilation
EMPTY, FILLED = "empty", "filled"  # states of torch's caches on disk
Row = dict[str, Any]


def decode(name: str, dtype: str) -> Row:
    """Run the calls of one process.

    Returns:
        For each call, its duration in seconds, the duration of the same call once compiled, and the
        number of graphs so far.
    """
    runner = Runner(load_pair(dtype, "cpu"), "greedy", CALLS[0][1])
    batches = {
        batch_size: runner.subject.batches(batch_size, batch_size, prompt_len=64)[0]
        for batch_size, _ in CALLS
    }
    method, calls = METHODS[name], []
    for batch_size, num_new in CALLS:
        begin = time.perf_counter()
        run = runner(method, batches[batch_size], max_new_tokens=num_new)
        seconds, num_graphs = time.perf_counter() - begin, counters["stats"]["unique_graphs"]
        if not runner.ran_compiled(method, run):
            raise SystemExit(
                f"{method.name} did not run compiled: {run.stats and run.stats.fallbacks}"
            )
        calls.append(
            {
                "batch_size": batch_size,
                "max_new_tokens": num_new,
                "seconds": seconds,
                "graphs": num_graphs,
            }
        )
    for call in calls:
        batch, num_new = batches[call["batch_size"]], call["max_new_tokens"]
        compiled_runs = [
            runner(method, batch, max_new_tokens=num_new).seconds for _ in range(NUM_AFTER)
        ]
        call["compiled_s"] = median(compiled_runs)
    return {"calls": calls}


def start(name: str, dtype: str, folder: Path) -> Row:
    """Decode in a new process that keeps its caches in a folder."""
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    command = [sys.executable, __file__, "--worker", name, "--dtype", dtype]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True
    )
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def row_of(name: str, caches: str, runs: list[Row], dtype: str) -> Row:
    """Summarise several processes.

    For compiling calls and later calls alike, the time beyond that of the same compiled call
    counts.
    """
    extra = [[call["seconds"] - call["compiled_s"] for call in run["calls"]] for run in runs]
    compile_s = sorted(sum(seconds[:NUM_COMPILING]) for seconds in extra)
    return {
        "method": METHODS[name].name,
        "caches": caches,
        "dtype": dtype,
        "processes": len(runs),
        "compile_s": {"min": compile_s[0], "median": median(compile_s), "max": compile_s[-1]},
        "first_s": median(seconds[0] for seconds in extra),
        "later_s": median(sum(seconds[NUM_COMPILING:]) for seconds in extra),
        "graphs": max(run["calls"][NUM_COMPILING - 1]["graphs"] for run in runs),
        "graphs_after": max(run["calls"][-1]["graphs"] for run in runs),
        "calls": [run["calls"] for run in runs],
    }


COLUMNS = {
    "method": lambda row: row["method"],
    "caches on disk": lambda row: row["caches"],
    "dtype": lambda row: row["dtype"],
    "processes": lambda row: row["processes"],
    "to compile, s (min to max)": lambda row: "{median:.1f} ({min:.1f} to {max:.1f})".format(
        **row["compile_s"]
    ),
    "of it the first call": lambda row: f"{row['first_s']:.1f}",
    "graphs": lambda row: row["graphs"],
    "other rows and lengths, s": lambda row: f"{row['later_s']:.1f}",
    "graphs then": lambda row: row["graphs_after"],
}
NOTES = f"""\
Greedy decoding with the bundled pair and the default schedule. To compile: extra seconds of the
first call of {CALLS[0][0]} rows and of the first call of one row, over the same calls once all is
compiled. Calls of other numbers of rows and of longer texts follow; they should reuse the graphs.
"""


def table(content: dict[str, Any]) -> str:
    """Format all cells, and explain the columns."""
    return f"{NOTES}\n{markdown(COLUMNS, content['rows'])}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=2, limit_s=600.0)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--worker", choices=list(METHODS), help=argparse.SUPPRESS)
    args = parse_common(parser)
    if args.worker:
        print(json.dumps(decode(args.worker, args.dtype)))
        return
    results = Results(NAME, args)
    for name in args.methods:
        runs: dict[str, list[Row]] = {EMPTY: [], FILLED: []}
        for _ in tqdm(range(args.repeats), desc=METHODS[name].name, disable=None):
            with tempfile.TemporaryDirectory() as folder:
                for run in runs.values():
                    run.append(start(name, args.dtype, Path(folder)))
        results.add(row_of(name, caches, run, args.dtype) for caches, run in runs.items())
    print(table({"rows": results.rows}))
    print(f"written to {results.write()}")


if __name__ == "__main__":
    main()
