"""Compare greedy `generate()` in two revisions of this library, with the bundled pair.

    python benchmarks/revisions.py ef758cd                          # against the working tree
    python benchmarks/revisions.py ef758cd 92535c9 --batch-sizes 8  # two revisions
    python benchmarks/revisions.py ef758cd --num-assistant-tokens adaptive

A process can import only one revision, so each revision runs in its own process, and the two take
turns call by call. The times of two processes with the same code differ by a percent or two, so
several pairs of processes are started. The sequences of both revisions must be equal.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _harness import (
    RESULTS,
    ROOT,
    Results,
    add_argument_of_adding,
    markdown,
    milliseconds,
    parse_common,
    speedups,
    spread,
)
from _subjects import DTYPES, read_batches
from tqdm import tqdm

NAME = "revisions"
WORKER = ROOT / "benchmarks" / "_revision.py"
WORKING_TREE = "working tree"
NUM_WARM_UP = 2  # number of warm-up calls in each new process
Row = dict[str, Any]


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def folder_of(revision: str, parent: Path) -> Path:
    """Return the folder with the library of a revision.

    It is written under `parent`, unless the revision is the working tree.
    """
    if revision == WORKING_TREE:
        return ROOT
    folder = parent / revision
    folder.mkdir()
    files = git("archive", revision, "hf_speculate", "triton_kernels")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=files, check=True)
    return folder


class Process:
    """Process that decodes with the library in a folder."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        options = [str(folder), args.dtype, args.num_assistant_tokens, str(args.max_new_tokens)]
        command = [sys.executable, str(WORKER), *options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def decode(self, inputs: dict[str, list[list[int]]]) -> Row:
        """Decode; return the duration of the call in seconds and the token ids [B, T + N]."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(inputs) + "\n")
        self._process.stdin.flush()
        answer: Row = json.loads(self._process.stdout.readline())
        return answer

    def stop(self) -> None:
        self._process.communicate()


@contextmanager
def processes(folders: dict[str, Path], args: argparse.Namespace) -> Iterator[dict[str, Process]]:
    """Run one process for each folder."""
    running = {name: Process(folder, args) for name, folder in folders.items()}
    try:
        yield running
    finally:
        for process in running.values():
            process.stop()


def measure(folders: dict[str, Path], batch_size: int, args: argparse.Namespace) -> Row:
    """Time both sides on the same batches, in seconds."""
    batches = read_batches(args.prompts, batch_size)
    jobs = [{name: values.tolist() for name, values in batch.inputs.items()} for batch in batches]
    seconds: dict[str, list[float]] = {name: [] for name in folders}
    sides = list(folders)
    for number in tqdm(range(args.processes), desc=f"{batch_size} rows", disable=None):
        started = sides if number % 2 == 0 else sides[::-1]
        with processes({name: folders[name] for name in started}, args) as running:
            for index in range(args.calls + NUM_WARM_UP):
                order = sides if index % 2 == 0 else sides[::-1]
                answers = {name: running[name].decode(jobs[index % len(jobs)]) for name in order}
                if answers["old"]["token_ids"] != answers["new"]["token_ids"]:
                    raise SystemExit(
                        f"{args.old} and {args.new} decode batch {index % len(jobs)} differently"
                    )
                if index >= NUM_WARM_UP:
                    for name, answer in answers.items():
                        seconds[name].append(answer["seconds"])
    return {
        "old": args.old,
        "new": args.new,
        "dtype": args.dtype,
        "batch_size": batch_size,
        "num_assistant_tokens": args.num_assistant_tokens,
        "num_calls": args.processes * args.calls,
        "old_s": spread(seconds["old"]),
        "new_s": spread(seconds["new"]),
        "new_over_old": median(seconds["new"]) / median(seconds["old"]),
        "old_over_new": speedups(seconds["old"], seconds["new"]),
        "checked": "sequences are equal",
    }


COLUMNS = {
    "old": lambda row: row["old"],
    "new": lambda row: row["new"],
    "dtype": lambda row: row["dtype"],
    "rows": lambda row: row["batch_size"],
    "K": lambda row: row["num_assistant_tokens"],
    "calls of each": lambda row: row["num_calls"],
    "old, ms (min to max)": lambda row: milliseconds(row["old_s"]),
    "new, ms (min to max)": lambda row: milliseconds(row["new_s"]),
    "median of new over median of old": lambda row: f"{row['new_over_old']:.3f}",
    "checked": lambda row: row["checked"],
}
NOTES = """\
Greedy decoding with the bundled pair. Each revision runs in its own process, and the two take turns
call by call.
"""


def table(content: dict[str, Any]) -> str:
    """Format all cells, and explain the columns."""
    return f"{NOTES}\n{markdown(COLUMNS, content['rows'])}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="revision, as git names it")
    parser.add_argument(
        "new", nargs="?", default=WORKING_TREE, help="revision; unset: the working tree"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--num-assistant-tokens", default="5", help='of every round, or "adaptive"')
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--processes", type=int, default=4, help="pairs of processes")
    parser.add_argument("--calls", type=int, default=30, help="of each process")
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cpu"), choices=[torch.device("cpu")]
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    add_argument_of_adding(parser)
    args = parse_common(parser)
    results = Results(NAME, args, lambda row: row["batch_size"])
    with tempfile.TemporaryDirectory() as parent:
        folders = {side: folder_of(getattr(args, side), Path(parent)) for side in ("old", "new")}
        for batch_size in args.batch_sizes:
            results.add([measure(folders, batch_size, args)])
    print(table({"rows": results.rows}))
    print(f"written to {results.write()}")


if __name__ == "__main__":
    main()
