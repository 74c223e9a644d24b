"""Run, time and record benchmarks, with alternating calls, common options and JSON results."""

import argparse
import ast
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from tqdm import tqdm

import hf_speculate
from hf_speculate.tools.atomic_file import replace_file
from hf_speculate.tools.bench.results import environment, spread

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path(hf_speculate.__file__).resolve().parents[1]
if LIBRARY != ROOT:
    raise ImportError(
        f"benchmarks must measure the library in {ROOT}, got the one in {LIBRARY}; set "
        f"PYTHONPATH={ROOT}"
    )
RESULTS = ROOT / "benchmarks" / "results"

Call = Callable[[], Any]
# The size is far larger than any cache.
COPY_BYTES = 1 << 28
# Once glibc has freed a block of up to this size, it keeps freed memory. Larger blocks make it map
# every tensor anew.
SETTLING_BYTES = 31 << 20
# A run is repeated if its threads waited for a processor for more than this share of the run.
MAX_QUEUED_SHARE = 0.02


def settle_allocator() -> None:
    """Put the CPU allocator in the state it has after a forward with large activations.

    A process without such a forward maps and clears memory for every new tensor. This costs more
    than the arithmetic and depends on earlier runs.
    """
    torch.empty(SETTLING_BYTES, dtype=torch.uint8)  # freed at once


def wait() -> None:
    """Synchronise with the GPU if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def copy_rate(device: torch.device, repeats: int = 11) -> float:
    """Return the bytes read and written per second when copying a large buffer."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    copy = torch.empty_like(source)
    seconds, _ = alternate_patiently({"copy": lambda: copy.copy_(source)}, repeats + 1)
    return 2 * COPY_BYTES / median(seconds["copy"][1:])


def queued_s() -> float:
    """Return how long threads of this process were ready to run but had no processor, in seconds.

    Returns 0 on systems other than Linux.
    """
    paths = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[1]) for path in paths) / 1e9


def timed_run(call: Call, prepare: Call | None, patience: int) -> tuple[float, bool]:
    """Time one run, and return whether another process delayed it.

    A delayed run is repeated up to `patience` times.
    """
    for attempt in range(patience + 1):
        if prepare is not None:
            prepare()
        wait()
        queued = queued_s()
        begin = time.perf_counter()
        call()
        wait()
        seconds = time.perf_counter() - begin
        held_up = queued_s() - queued > MAX_QUEUED_SHARE * seconds
        if not held_up or attempt == patience:
            return seconds, held_up
        time.sleep(seconds)  # leaves the processor to other processes
    raise ValueError(f"patience must be >= 0, got {patience}; 0 keeps the first run")


def alternate_patiently(
    calls: dict[str, Call],
    repeats: int,
    description: str = "",
    prepare: Call | None = None,
    patience: int = 10,
) -> tuple[dict[str, list[float]], int]:
    """Time calls like `alternate`, but repeat a run if other processes delayed it.

    Returns: The seconds per call, and the number of returned runs that were delayed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    num_held_up = 0
    order = list(calls)
    with tqdm(total=repeats * len(order), desc=description, leave=False, disable=None) as bar:
        for repeat in range(repeats):
            for name in order if repeat % 2 == 0 else reversed(order):
                taken, held_up = timed_run(calls[name], prepare, patience)
                seconds[name].append(taken)
                num_held_up += held_up
                bar.update()
    return seconds, num_held_up


def alternate(
    calls: dict[str, Call], repeats: int, description: str = "", prepare: Call | None = None
) -> dict[str, list[float]]:
    """Time `repeats` runs of each call, alternately, so that all run under the same machine load.

    `prepare` runs before every run and is not counted.
    """
    return alternate_patiently(calls, repeats, description, prepare, patience=0)[0]


def speedups(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """Return the speed-up of `ours` for each run."""
    return spread([theirs_s / ours_s for theirs_s, ours_s in zip(theirs, ours, strict=True)])


def milliseconds(seconds: dict[str, float], digits: int = 1) -> str:
    """Format the median, minimum and maximum of a `spread` in milliseconds."""
    shown = (f"{1e3 * seconds[name]:.{digits}f}" for name in ("median", "min", "max"))
    return "{} ({} to {})".format(*shown)


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Remove the docstrings from `tree` in place."""
    for node in ast.walk(tree):
        has_docstring = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        if has_docstring and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


def digest_of(paths: Iterable[Path], root: Path = ROOT) -> str:
    """Return 12 digits of a SHA-256 hash over names and code of Python files.

    Comments and docstrings do not count.
    """
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(ast.unparse(without_docstrings(ast.parse(path.read_bytes()))).encode())
    return digest.hexdigest()[:12]


def part_of(path: Path) -> str:
    """Return the part of the library that contains `path`: an option, a tool or the core."""
    parts = path.with_suffix("").parts
    return (
        "/".join(parts[1:3])
        if parts[0] == "hf_speculate" and parts[1] in ("options", "tools")
        else "core"
    )


def library_files(root: Path = ROOT) -> list[Path]:
    return list((root / "hf_speculate").rglob("*.py"))


def loaded_parts() -> list[str]:
    """Return the parts of the library that this process has loaded."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(file).resolve() for file in files if file}
    return sorted(
        {part_of(path.relative_to(ROOT)) for path in library_files() if path.resolve() in paths}
    )


def source_hash(parts: Collection[str], root: Path = ROOT) -> str:
    """Return the digest of the library files in `parts`."""
    return digest_of(
        (path for path in library_files(root) if part_of(path.relative_to(root)) in parts), root
    )


def provenance() -> dict[str, Any]:
    """Return versions, device, date, commit, and the loaded library parts with their digest."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        )
        commit = done.stdout.strip()
    except FileNotFoundError:  # a machine without git
        commit = ""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = loaded_parts()
    return environment(device) | {
        "commit": commit or "unknown",
        "parts": parts,
        "sources": source_hash(parts),
    }


def add_common_arguments(parser: argparse.ArgumentParser, repeats: int, limit_s: float) -> None:
    """Add the options shared by all benchmarks of `generate()`."""
    has_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cuda" if has_gpu else "cpu")
    )
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="runs of each method on each input"
    )
    parser.add_argument("--limit-s", type=float, default=limit_s, help="begin no cell after this")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder for the JSON and the picture"
    )


def add_argument_of_adding(parser: argparse.ArgumentParser) -> None:
    """Add `--add` for benchmarks with long cells; see `Results`."""
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the cells of the results outside this run",
    )


def parse_common(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the arguments, and silence transformers, whose warnings would break progress bars."""
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    return args


class Cells:
    """Cells of a grid under a progress bar.

    Iteration stops when the time is used up. `left_out` names the remaining cells.
    """

    def __init__(self, cells: Iterable[Any], limit_s: float | None, description: str):
        self.cells, self.limit_s, self.description = list(cells), limit_s, description
        self.left_out: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        begin = time.perf_counter()
        for cell in tqdm(self.cells, desc=self.description, disable=None):
            if self.limit_s is not None and time.perf_counter() - begin > self.limit_s:
                self.left_out.append(" ".join(map(str, cell)))
                continue
            yield cell
        if self.left_out:
            print(f"left out after {self.limit_s:.0f} s: {'; '.join(self.left_out)}")


def markdown(
    columns: dict[str, Callable[[dict[str, Any]], Any]], rows: Iterable[dict[str, Any]]
) -> str:
    """Format a table with one column per heading; floats get two decimals, and None is a dash."""

    def shown(value: Any) -> str:
        return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(shown(cell(row)) for cell in columns.values())} |" for row in rows]
    return "\n".join(lines)


def result_name(name: str, device: torch.device) -> str:
    """Return the file name of results, which differs between CPU and GPU."""
    return name if device.type == "cpu" else f"{name}_{device.type}"


def write_results(
    name: str, args: argparse.Namespace, rows: list[dict[str, Any]], folder: Path = RESULTS
) -> Path:
    """Write `<folder>/<name>.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    arguments = {
        key: str(value) if isinstance(value, Path | torch.device) else value
        for key, value in vars(args).items()
        if key != "results"  # the location of the file is not part of its content
    }
    content = {"environment": provenance(), "arguments": arguments, "rows": rows}
    replace_file(path, [(json.dumps(content, indent=1) + "\n").encode()])
    return path


class Results:
    """Rows of a run, saved in `<args.results>/<name>.json`.

    The file is written after every cell.

    Args:
        name: name of the file, to which the device is added unless it is a CPU.
        args: command-line arguments; `--add` keeps cells of the file that this run does not
        measure.
        cell_of: returns the cell of a row; required for `--add`.
    """

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        cell_of: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self.name = result_name(name, args.device)
        self.new: list[dict[str, Any]] = []
        self._args, self._cell_of = args, cell_of
        self._earlier = self._read_earlier(cell_of) if cell_of is not None and args.add else []

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows in the file."""
        if self._cell_of is None or not self._earlier:
            return self.new
        measured = {self._cell_of(row) for row in self.new}
        earlier_rows = [row for row in self._earlier if self._cell_of(row) not in measured]
        return sorted(earlier_rows + self.new, key=self._cell_of)

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write the rows of a cell."""
        self.new += rows
        self.write()

    def write(self) -> Path:
        """Write all rows with the current arguments."""
        return write_results(self.name, self._args, self.rows, self._args.results)

    def _read_earlier(self, cell_of: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
        """Read the rows of the file, and add the source of the measurement to each."""
        content = read_results(self.name, self._args.results)
        source = "{device}; commit {commit}; {date}".format(**content["environment"])
        source += f"; runs of each method on each input: {content['arguments']['repeats']}"
        for row in content["rows"]:
            row.setdefault("earlier", {"cell": ", ".join(map(str, cell_of(row))), "source": source})
        rows: list[dict[str, Any]] = content["rows"]
        return rows


def read_results(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Read a file written by `write_results`."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} does not exist; run benchmarks/{name}.py without options first")
    return json.loads(path.read_text(encoding="utf-8"))


def write_between(path: Path, name: str, text: str) -> None:
    """Replace the text between the lines `<!-- name: begin -->` and `<!-- name: end -->`."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    content = path.read_text(encoding="utf-8")
    if content.count(begin) != 1 or content.count(end) != 1:
        raise SystemExit(
            f"{path} must hold one line {begin.strip()} and, after it, one line {end}; add them "
            "first"
        )
    before, after = content.split(begin)
    path.write_text(
        before + begin + text.strip() + "\n" + end + after.split(end)[1], encoding="utf-8"
    )
