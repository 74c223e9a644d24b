"""The rules that ruff does not know: imports go to a lower layer, files stay short, names say what they hold."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 320

# Package or file -> layer. Imports go to a lower layer, or stay inside one package.
FLOORS = {
    "hf_speculate": 13,
    "hf_speculate.tools": 12,
    "hf_speculate.options": 11,
    "hf_speculate.generation": 10,
    "hf_speculate.engine": 9,
    "hf_speculate.verify": 8,
    "hf_speculate.schedule": 8,
    "hf_speculate.draft": 7,
    "hf_speculate.models": 6,
    "hf_speculate.cache": 5,
    "hf_speculate.processors": 5,
    "hf_speculate.config": 4,
    "hf_speculate.stats": 3,
    "hf_speculate.plotting": 2,
    "hf_speculate.compat": 1,
    "hf_speculate.per_row": 1,
    "hf_speculate.field_checks": 1,
    "hf_speculate.types": 0,
    "hf_speculate.errors": 0,
    "hf_speculate.caller": 0,
    "hf_speculate.model_state": 0,
    "hf_speculate.transfers": 0,
    "hf_speculate.triton_kernels": -1,
}
KERNELS = "hf_speculate.triton_kernels"
# Names that say nothing of what they hold, and comments that have no subject.
VAGUE = frozenset(("one", "found", "given", "made", "held", "place", "places", "placed", "kinds"))
NO_SUBJECT = re.compile(r"(?:^|\s)# [oO]f\b")


def library_files() -> dict[str, Path]:
    """Module name -> file, with the kernels under the name they are installed as."""
    files = {}
    for folder, package in (("hf_speculate", "hf_speculate"), ("triton_kernels", KERNELS)):
        for path in sorted((ROOT / folder).rglob("*.py")):  # which follows no links
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join((package, *parts)).removesuffix(".__init__")] = path
    return files


def package_of(module: str) -> str:
    """The package that `module` lies in; empty if the table has none."""
    if module == "hf_speculate":
        return module
    packages = [package for package in FLOORS if package != "hf_speculate" and f"{module}.".startswith(f"{package}.")]
    return max(packages, key=len, default="")


def imported_modules(node: ast.AST) -> list[str]:
    """Dotted names that an absolute import reaches; a name imported from a package counts as lying in it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom) or node.level:
        return []
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if package_of(name) or "._" in name else str(node.module) for name in names]


def import_problem(name: str, package: str, is_local: bool) -> str:
    """What is wrong with an import of `name` in a file of `package`; empty if nothing is."""
    root, target = name.partition(".")[0], package_of(name)
    if root == "triton_kernels" or (root == "triton" and package != KERNELS):
        return "only triton_kernels imports triton, and is itself imported by its installed name"
    if root == "transformers" and (package == KERNELS or ("._" in name and package != "hf_speculate.compat")):
        return "transformers is not for triton_kernels, and its private names are for compat.py"
    if root != "hf_speculate":
        return ""
    if package == KERNELS:
        return "imports inside triton_kernels are relative"
    if is_local:
        return "an import inside a function"
    if not target:
        return "no layer: add it to FLOORS"
    is_lower = FLOORS[target] < FLOORS[package]
    return "" if is_lower or target == package else f"layer {FLOORS[target]} from layer {FLOORS[package]}"


def bound_name(node: ast.AST) -> str:
    """The name that a node binds as a variable, a parameter, an attribute or a function; empty if it binds none."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.MatchAs(name=str(name)):
            return name
    return ""


def vague_words(source: str, tree: ast.AST) -> Iterator[str]:
    """Names and comments of `source` that say nothing of what they stand for, with their lines."""
    for node in ast.walk(tree):
        if bound_name(node).strip("_") in VAGUE:
            yield f"{getattr(node, 'lineno', 0)}: {bound_name(node)} is a vague name"
    for number, line in enumerate(source.splitlines(), 1):
        if NO_SUBJECT.search(line):
            yield f"{number}: begin the comment with its noun"


def problems_of(source: str, module: str) -> Iterator[str]:
    """Everything that `source` does against the rules, were it the module `module`."""
    tree, package, num_lines = ast.parse(source), package_of(module), len(source.splitlines())
    if not package:
        yield f"{module} has no layer: add it to FLOORS"
    if num_lines > MAX_LINES:
        yield f"{module}: {num_lines} lines: at most {MAX_LINES}"
    yield from (f"{module}:{problem}" for problem in vague_words(source, tree))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    for node in ast.walk(tree):
        is_written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if is_written and ast.unparse(node).split(".")[0] in imported:
            yield f"{module}:{node.lineno}: assigns to an attribute of something imported"
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    local = {inner for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree) if package else ():
        for name in imported_modules(node):
            if problem := import_problem(name, package, node in local):
                yield f"{module}:{node.lineno} {name}: {problem}"


def test_every_module_keeps_the_rules() -> None:
    problems = [
        problem for module, path in library_files().items() for problem in problems_of(path.read_text(), module)
    ]
    assert not problems, "\n".join(problems)


def test_benchmarks_and_examples_import_what_exists() -> None:
    """The benchmarks for GPUs and those run by hand are otherwise imported by no test."""
    names = {
        name
        for folder in ("benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "hf_speculate"
        for name in ((str(node.module), alias.name) for alias in node.names)
    }
    modules = library_files()
    missing = [
        f"{module}.{name}"
        for module, name in sorted(names)
        if f"{module}.{name}" not in modules and not hasattr(importlib.import_module(module), name)
    ]
    assert names
    assert not missing


@pytest.mark.parametrize(
    ("module", "source", "text"),
    [
        ("engine.decoder", "from hf_speculate.generation.enable import enable", "layer 10 from layer 9"),
        ("types", "from transformers import Cache as C\nC.update = print", "assigns to an attribute"),
        ("types", "from hf_speculate import transfers", "layer 0 from layer 0"),
        ("newpackage", "import torch", "has no layer"),
        ("cache.base", "def f():\n    from hf_speculate.types import KVState", "inside a function"),
        ("engine.decoder", "def f():\n    import triton", "only triton_kernels"),
        ("triton_kernels.reference", "import transformers", "not for triton_kernels"),
        ("triton_kernels.reference", "from hf_speculate.triton_kernels.types import Verdict", "are relative"),
        ("engine.builder", "from transformers.generation.utils import _x", "private names"),
        ("stats", "x = 1\n" * (MAX_LINES + 1), "at most"),
        ("cache.base", "for one in range(2):\n    print(one)", "one is a vague name"),
        ("cache.base", "class A:\n    def f(self, given):\n        return given", "given is a vague name"),
        ("cache.base", "WIDTH = 3  # of a row", "begin the comment with its noun"),
        ("engine.decoder", "from hf_speculate import errors, types", ""),
        ("triton_kernels.rejection", "from .types import Verdict\ndef f():\n    import triton", ""),
        ("compat", "from transformers.utils import _x", ""),
    ],
)
def test_the_checker_finds(module: str, source: str, text: str) -> None:
    problems = list(problems_of(source, f"hf_speculate.{module}"))
    assert len(problems) == bool(text), problems
    assert text in "".join(problems)
