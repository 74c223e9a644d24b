"""Shared by all benchmarks: alternating runs, options, and results as JSON with their environment."""

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
# Far larger than any cache.
COPY_BYTES = 1 << 28
# The largest block after whose release glibc keeps freed memory at hand, instead of mapping every
# tensor afresh.
SETTLING_BYTES = 31 << 20
# A run whose threads waited longer than this share of it for a processor says more of the others
# than of itself.
MAX_QUEUED_SHARE = 0.02


def settle_allocator() -> None:
    """Bring a CPU's allocator to the state in which any forward with large activations leaves it.

    A process that never freed a large tensor maps and clears the memory of every new one, which
    costs more than the arithmetic on it and depends on what ran before.
    """
    torch.empty(SETTLING_BYTES, dtype=torch.uint8)  # freed at once


def wait() -> None:
    """Wait for the GPU, where one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def copy_rate(device: torch.device, repeats: int = 11) -> float:
    """Bytes per second, read and written, of copying a large buffer."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    copy = torch.empty_like(source)
    seconds, _ = alternate_patiently({"copy": lambda: copy.copy_(source)}, repeats + 1)
    return 2 * COPY_BYTES / median(seconds["copy"][1:])


def queued_s() -> float:
    """Seconds that this process's threads were ready to run while another process had the processor; 0 off Linux."""
    paths = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[1]) for path in paths) / 1e9


def timed_run(call: Call, prepare: Call | None, patience: int) -> tuple[float, bool]:
    """Seconds of one run, and whether another process held it up; such a run is taken again up to `patience` times."""
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
    """As `alternate`, but takes a run again when other processes held it up; also how many kept runs they did."""
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
    """Seconds of `repeats` runs of each call, in turn so that all meet the same load of the machine.

    `prepare` runs before every run and is not counted.
    """
    return alternate_patiently(calls, repeats, description, prepare, patience=0)[0]


def speedups(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """How many times faster `ours` is, run by run."""
    return spread([theirs_s / ours_s for theirs_s, ours_s in zip(theirs, ours, strict=True)])


def milliseconds(seconds: dict[str, float], digits: int = 1) -> str:
    """Median, minimum and maximum of what `spread` gives, in milliseconds."""
    shown = (f"{1e3 * seconds[name]:.{digits}f}" for name in ("median", "min", "max"))
    return "{} ({} to {})".format(*shown)


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Take the docstrings out of `tree`, which is changed."""
    for node in ast.walk(tree):
        has_docstring = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        if has_docstring and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


def digest_of(paths: Iterable[Path], root: Path = ROOT) -> str:
    """12 digits of the SHA-256 of the names and the code of Python files; comments and docstrings do not count."""
    sha = hashlib.sha256()
    for path in sorted(paths):
        sha.update(f"{path.relative_to(root).as_posix()}\n".encode())
        sha.update(ast.unparse(without_docstrings(ast.parse(path.read_bytes()))).encode())
    return sha.hexdigest()[:12]


def part_of(path: Path) -> str:
    """The part of the library that `path`, relative to the root, belongs to: an option, a tool, or the core."""
    parts = path.with_suffix("").parts
    return (
        "/".join(parts[1:3])
        if parts[0] == "hf_speculate" and parts[1] in ("options", "tools")
        else "core"
    )


def library_files(root: Path = ROOT) -> list[Path]:
    return list((root / "hf_speculate").rglob("*.py"))


def loaded_parts() -> list[str]:
    """The parts of which this process has loaded a module."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(file).resolve() for file in files if file}
    return sorted(
        {part_of(path.relative_to(ROOT)) for path in library_files() if path.resolve() in paths}
    )


def source_hash(parts: Collection[str], root: Path = ROOT) -> str:
    """The digest of the library's files that belong to `parts`."""
    return digest_of(
        (path for path in library_files(root) if part_of(path.relative_to(root)) in parts), root
    )


def provenance() -> dict[str, Any]:
    """Versions, device, date, commit, the parts of the library that were loaded, and the hash of their code."""
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
    """Options of every benchmark of `generate()`."""
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
    """For benchmarks whose cells take long enough to be measured one by one; see `Results`."""
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the cells of the results that this run leaves alone",
    )


def parse_common(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse, and keep transformers quiet: its warnings would tear the progress bars."""
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    return args


class Cells:
    """Walks the cells of a grid under a progress bar, until the time is used up; what is left out is kept."""

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
    """A table with one column per head; floats have two decimals, None is a dash."""

    def shown(value: Any) -> str:
        return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(shown(cell(row)) for cell in columns.values())} |" for row in rows]
    return "\n".join(lines)


def result_name(name: str, device: torch.device) -> str:
    """Results of a CPU and of a GPU lie side by side."""
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
        if key != "results"  # where the file lies says nothing of what is in it
    }
    content = {"environment": provenance(), "arguments": arguments, "rows": rows}
    replace_file(path, [(json.dumps(content, indent=1) + "\n").encode()])
    return path


class Results:
    """The rows of a run, written to `<args.results>/<name>.json` after every cell.

    Args:
        name: of the file; the device is added unless it is a CPU.
        args: of the command line; with `--add`, cells of the file that this run does not measure
            stay in it.
        cell_of: which cell a row belongs to; required for `--add`.
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
        kept = [row for row in self._earlier if self._cell_of(row) not in measured]
        return sorted(kept + self.new, key=self._cell_of)

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write the rows of a cell."""
        self.new += rows
        self.write()

    def write(self) -> Path:
        """Write all rows, with the arguments as they are now."""
        return write_results(self.name, self._args, self.rows, self._args.results)

    def _read_earlier(self, cell_of: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
        """The file's rows, each with what measured it."""
        content = read_results(self.name, self._args.results)
        source = "{device}; commit {commit}; {date}; runs of each method on each input: {repeats}".format(
            **content["environment"], repeats=content["arguments"]["repeats"]
        )
        for row in content["rows"]:
            row.setdefault("earlier", {"cell": ", ".join(map(str, cell_of(row))), "source": source})
        rows: list[dict[str, Any]] = content["rows"]
        return rows


def read_results(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """What `write_results` wrote."""
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
    before, rest = content.split(begin)
    path.write_text(
        before + begin + text.strip() + "\n" + end + rest.split(end)[1], encoding="utf-8"
    )
