"""Run, time and record benchmarks: alternating calls, common options, results as JSON."""

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

from hf_speculate.tools.atomic_file import replace_file
from hf_speculate.tools.bench.results import environment, spread

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Call = Callable[[], Any]
# The size is far larger than any cache.
COPY_BYTES = 1 << 28
# After the release of a block up to this size glibc keeps freed memory. Larger blocks make it map
# every tensor afresh.
SETTLING_BYTES = 31 << 20
# A run is repeated if its threads queued for a processor for more than this share of it.
MAX_QUEUED_SHARE = 0.02


def settle_allocator() -> None:
    """Bring a CPU's allocator to its state after a forward with large activations.

    A process without such a forward maps and clears the memory of every new tensor. This costs more
    than the arithmetic, and it depends on earlier runs.
    """
    torch.empty(SETTLING_BYTES, dtype=torch.uint8)  # freed at once


def wait() -> None:
    """Wait for the GPU if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def copy_rate(device: torch.device, repeats: int = 11) -> float:
    """Return the rate of copying a large buffer: bytes read and written per second."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    copy = torch.empty_like(source)
    seconds, _ = alternate_patiently({"copy": lambda: copy.copy_(source)}, repeats + 1)
    return 2 * COPY_BYTES / median(seconds["copy"][1:])


def queued_s() -> float:
    """Return the seconds that this process's threads were ready to run but had no processor.

    Returns 0 off Linux.
    """
    paths = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[1]) for path in paths) / 1e9


def timed_run(call: Call, prepare: Call | None, patience: int) -> tuple[float, bool]:
    """Time one run and return whether another process held it up.

    A run that was held up is repeated up to `patience` times.
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
        time.sleep(seconds)  # leaves the processor to the others meanwhile
    raise ValueError(f"patience must be >= 0, got {patience}; 0 keeps the first run")


def alternate_patiently(
    calls: dict[str, Call],
    repeats: int,
    description: str = "",
    prepare: Call | None = None,
    patience: int = 10,
) -> tuple[dict[str, list[float]], int]:
    """Time calls like `alternate`, but repeat a run if other processes held it up.

    Returns:
        The seconds of each call, and the number of returned runs that were held up.
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
    """Time `repeats` runs of each call, in turn, so all meet the same load of the machine.

    `prepare` runs before every run and is not counted.
    """
    return alternate_patiently(calls, repeats, description, prepare, patience=0)[0]


def speedups(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """Return how many times faster `ours` is, run by run."""
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
    """Return 12 digits of the SHA-256 of the names and the code of Python files.

    Comments and docstrings do not count.
    """
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(ast.unparse(without_docstrings(ast.parse(path.read_bytes()))).encode())
    return digest.hexdigest()[:12]


def part_of(path: Path) -> str:
    """Return the library's part of `path`, relative to the root: an option, a tool or the core."""
    parts = path.with_suffix("").parts
    return (
        "/".join(parts[1:3])
        if parts[0] == "hf_speculate" and parts[1] in ("options", "tools")
        else "core"
    )


def library_files(root: Path = ROOT) -> list[Path]:
    return list((root / "hf_speculate").rglob("*.py"))


def loaded_parts() -> list[str]:
    """Return the parts of the library with a module in this process."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(file).resolve() for file in files if file}
    return sorted(
        {part_of(path.relative_to(ROOT)) for path in library_files() if path.resolve() in paths}
    )


def source_hash(parts: Collection[str], root: Path = ROOT) -> str:
    """Return the digest of the library's files in `parts`."""
    return digest_of(
        (path for path in library_files(root) if part_of(path.relative_to(root)) in parts), root
    )


def provenance() -> dict[str, Any]:
    """Return versions, device, date, commit, the loaded parts of the library and their digest."""
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
    """Add the options of every benchmark of `generate()`."""
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
    """Parse the arguments and silence transformers: its warnings would tear the progress bars."""
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    return args


class Cells:
    """Cells of a grid under a progress bar.

    Iteration ends the measurements when the time is used up. `left_out` names the remaining cells.
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
    """Format a table with one column per head; floats have two decimals, None is a dash."""

    def shown(value: Any) -> str:
        return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(shown(cell(row)) for cell in columns.values())} |" for row in rows]
    return "\n".join(lines)


def result_name(name: str, device: torch.device) -> str:
    """Return the file name of results; results of a CPU and of a GPU lie side by side."""
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
        if key != "results"  # the place of the file is no property of its content
    }
    content = {"environment": provenance(), "arguments": arguments, "rows": rows}
    replace_file(path, [(json.dumps(content, indent=1) + "\n").encode()])
    return path


class Results:
    """Rows of a run, written to `<args.results>/<name>.json`.

    The file is written after every cell.

    Args:
        name: of the file; the device is added unless it is a CPU.
        args: of the command line; `--add` keeps the cells of the file that this run leaves alone.
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
        """All rows of the file."""
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
        """Write all rows, with the arguments as they are now."""
        return write_results(self.name, self._args, self.rows, self._args.results)

    def _read_earlier(self, cell_of: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
        """Read the file's rows and add to each the source of its measurement."""
        content = read_results(self.name, self._args.results)
        source = "{device}; commit {commit}; {date}".format(**content["environment"])
        source += f"; runs of each method on each input: {content['arguments']['repeats']}"
        for row in content["rows"]:
            row.setdefault("earlier", {"cell": ", ".join(map(str, cell_of(row))), "source": source})
        rows: list[dict[str, Any]] = content["rows"]
        return rows


def read_results(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Read the file of `write_results`."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} does not exist; run benchmarks/{name}.py without options first")
    return json.loads(path.read_text(encoding="utf-8"))


def write_between(path: Path, name: str, text: str) -> None:
    """Put `text` between the lines `<!-- name: begin -->` and `<!-- name: end -->` of a file."""
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
