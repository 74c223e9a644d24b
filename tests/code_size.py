"""Print the size of the library's code; no limit is enforced.

    python -m tests.code_size

The report begins with the files that one plain greedy call with a tiny draft model runs and loads.
A file counts as run if one of its functions is called between the start and the end of
`generate()`; kernels and the `__init__.py` files of packages are not counted. The report then lists
the longest files and functions, and the number of lines per package.
"""

import ast
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import CO_OPTIMIZED  # code flag that functions have, but modules and classes do not
from pathlib import Path

import torch

import hf_speculate
from tests.support.tiny import make_model
from tests.test_floors import library_files, package_of

LIBRARY = Path(hf_speculate.__file__).parent
# counted as part of the enclosing function or module
PARTS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
NUM_SHOWN = 10


@contextmanager
def called_files() -> Iterator[set[str]]:
    """Collect the files whose functions are called, in any thread."""
    files = set()

    def record(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_flags & CO_OPTIMIZED and code.co_name not in PARTS:
            files.add(frame.f_code.co_filename)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_by_file(files: Iterable[str | None]) -> dict[str, int]:
    """Count the lines of each library file in `files`, by path relative to `hf_speculate`."""
    paths = sorted(Path(file) for file in files if file is not None)
    own = [path for path in paths if path.is_relative_to(LIBRARY) and path.name != "__init__.py"]
    names = {path.relative_to(LIBRARY).as_posix(): path for path in own}
    return {
        name: num_lines(path) for name, path in names.items() if not name.startswith("kernels/")
    }


def traced_call() -> tuple[dict[str, int], dict[str, int]]:
    """Return the files run by a plain greedy call and all loaded files, with line counts."""
    target = hf_speculate.enable(make_model("llama", num_hidden_layers=8))
    draft = make_model("llama", num_hidden_layers=1)  # small enough to draft in round one
    prompt, stats = torch.tensor([[5, 6, 7, 8]]), hf_speculate.SpeculationStats()
    with called_files() as called:
        target.generate(
            prompt,
            assistant_model=draft,
            do_sample=False,
            max_new_tokens=16,
            speculation_stats=stats,
        )
    assert stats.num_drafted
    loaded = [getattr(module, "__file__", None) for module in sys.modules.values()]
    return lines_by_file(called), lines_by_file(loaded)


def lines_by_function(path: Path) -> dict[str, int]:
    """Count the lines of each function in a file, keyed by its name and first line."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        f"{node.name}, line {node.lineno}": node.end_lineno - node.lineno + 1 for node in functions
    }


def print_longest(title: str, lines: Mapping[str, int], num_shown: int | None = NUM_SHOWN) -> None:
    print(f"{title}:")
    for name, num in Counter(lines).most_common(num_shown):
        print(f"{num:7,}  {name}")


def main() -> None:
    for verb, files in zip(("runs", "loads"), traced_call(), strict=True):
        print(f"A plain greedy call {verb} {len(files)} files of {sum(files.values()):,} lines")
    files = library_files()
    functions = {
        f"{name}: {key}": num
        for name, path in files.items()
        for key, num in lines_by_function(path).items()
    }
    packages: Counter[str] = Counter()
    for name, path in files.items():
        packages[package_of(name)] += num_lines(path)
    print_longest("Longest files", {name: num_lines(path) for name, path in files.items()})
    print_longest("Longest functions", functions)
    print_longest(f"Lines of {packages.total():,} by package", packages, num_shown=None)


if __name__ == "__main__":
    main()
