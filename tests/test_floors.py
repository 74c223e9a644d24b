"""Test rules that ruff does not have: imports go down, and no code assigns to what it imports."""

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Layer of each package or file. Imports go to a lower layer, or stay within one package.
FLOORS = {
    "hf_speculate": 14,
    "hf_speculate.tools": 13,
    "hf_speculate.options": 12,
    "hf_speculate.generation": 11,
    "hf_speculate.engine": 10,
    "hf_speculate.verify": 9,
    "hf_speculate.schedule": 9,
    "hf_speculate.draft": 8,
    "hf_speculate.models": 7,
    "hf_speculate.cache": 6,
    "hf_speculate.processors": 6,
    "hf_speculate.config": 4,
    "hf_speculate.stats": 3,
    "hf_speculate.compat": 1,
    "hf_speculate.rows": 1,
    "hf_speculate.field_checks": 1,
    "hf_speculate.types": 0,
    "hf_speculate.errors": 0,
    "hf_speculate.model_state": 0,
    "hf_speculate.transfers": 0,
    "hf_speculate.kernels": -1,
}
KERNELS = "hf_speculate.kernels"
TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
FILE_LAYER = 5  # top-level files that are not listed: above the listed files, below the packages
# Only annotations may import from higher layers, and never from these.
NOT_CORE = ("hf_speculate", "hf_speculate.tools", "hf_speculate.options")


def library_files() -> dict[str, Path]:
    """Return the library's files, keyed by module name."""
    files = {}
    for path in sorted((ROOT / "hf_speculate").rglob("*.py")):
        files[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = (
            path
        )
    return files


def layers_of(files: Mapping[str, Path]) -> dict[str, int]:
    """Return the table extended by the layer of the top-level files that it does not list."""
    top_level = [
        name for name, path in files.items() if name.count(".") == 1 and path.name != "__init__.py"
    ]
    return dict.fromkeys(top_level, FILE_LAYER) | FLOORS


LAYERS = layers_of(library_files())


def package_of(module: str) -> str:
    """Return the package or top-level file of `module`, or an empty string if it has no layer."""
    if module == "hf_speculate":
        return module
    packages = [
        package
        for package in LAYERS
        if package != "hf_speculate" and f"{module}.".startswith(f"{package}.")
    ]
    return max(packages, key=len, default="")


def imported_modules(node: ast.AST) -> list[str]:
    """Return the dotted names of an absolute import, with names from a package as modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom) or node.level:
        return []
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if package_of(name) or "._" in name else str(node.module) for name in names]


def import_problem(name: str, package: str, is_local: bool, is_for_annotations: bool) -> str:
    """Describe the fault in importing `name` in a file of `package`; return "" without a fault."""
    root, target = name.partition(".")[0], package_of(name)
    if root == "triton_kernels" or (root == "triton" and package != KERNELS):
        return "only the kernels import triton, and are themselves imported as hf_speculate.kernels"
    if root == "transformers" and (
        package == KERNELS or ("._" in name and package != "hf_speculate.compat")
    ):
        return "transformers is not for the kernels, and its private names are for compat.py"
    if root != "hf_speculate":
        return ""
    if package == KERNELS:
        return "imports inside the kernels are relative"
    if is_local:
        return "an import inside a function"
    if not target:
        return "no layer: add its package to FLOORS"
    is_allowed = target == package or LAYERS[target] < LAYERS[package]
    is_allowed |= is_for_annotations and target not in NOT_CORE
    return "" if is_allowed else f"layer {LAYERS[target]} from layer {LAYERS[package]}"


def nodes_for_annotations(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes under `if TYPE_CHECKING:`, which never run."""
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in TYPE_CHECKING
    ]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def problems_of(source: str, module: str) -> Iterator[str]:
    """Return every violation of the rules in `source`, checked as the module `module`."""
    tree, package = ast.parse(source), package_of(module)
    if not package:
        yield f"{module} has no layer: add its package to FLOORS"
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {
        (alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names
    }
    for node in ast.walk(tree):
        is_written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if is_written and ast.unparse(node).split(".")[0] in imported:
            yield f"{module}:{node.lineno}: assigns to an attribute of something imported"
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    local = {inner for function in functions for inner in ast.walk(function)}
    for_annotations = nodes_for_annotations(tree)
    for node in ast.walk(tree) if package else ():
        for name in imported_modules(node):
            if problem := import_problem(name, package, node in local, node in for_annotations):
                yield f"{module}:{node.lineno} {name}: {problem}"


def test_modules_keep_the_import_rules() -> None:
    problems = [
        problem
        for module, path in library_files().items()
        for problem in problems_of(path.read_text(), module)
    ]
    assert not problems, "\n".join(problems)


def test_benchmarks_and_examples_import_what_exists() -> None:
    """Include GPU benchmarks and manual benchmarks, because no other test imports them."""
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


FOR_ANNOTATIONS = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("module", "source", "text"),
    [
        (
            "engine.decoder",
            "from hf_speculate.generation.enable import enable",
            "layer 11 from layer 10",
        ),
        (
            "types",
            "from transformers import Cache as C\nC.update = print",
            "assigns to an attribute",
        ),
        ("types", "from hf_speculate import transfers", "layer 0 from layer 0"),
        ("newpackage.part", "import torch", "has no layer"),
        ("cache.base", "def f():\n    from hf_speculate.types import KVState", "inside a function"),
        ("engine.decoder", "def f():\n    import triton", "only the kernels"),
        ("kernels.reference", "import transformers", "not for the kernels"),
        ("kernels.reference", "from hf_speculate.kernels.types import Verdict", "are relative"),
        ("engine.plan", "from transformers.generation.utils import _x", "private names"),
        ("cache.base", "from hf_speculate import enable", "layer 14 from layer 6"),
        (
            "cache.base",
            f"{FOR_ANNOTATIONS}from hf_speculate.options.heads import load",
            "layer 12 from layer 6",
        ),
        (
            "cache.base",
            f"{FOR_ANNOTATIONS}pass\nfrom hf_speculate.engine import plan",
            "layer 10 from layer 6",
        ),
        ("cache.base", f"{FOR_ANNOTATIONS}from hf_speculate.engine.plan import Plan", ""),
        ("engine.decoder", "from hf_speculate import errors, types", ""),
        ("kernels.rejection", "from .types import Verdict\ndef f():\n    import triton", ""),
        ("compat", "from transformers.utils import _x", ""),
    ],
)
def test_checker_finds_forbidden_imports_and_writes(module: str, source: str, text: str) -> None:
    problems = list(problems_of(source, f"hf_speculate.{module}"))
    assert len(problems) == bool(text), problems
    assert text in "".join(problems)


def test_packages_need_a_line_and_top_level_files_none() -> None:
    files = {
        "hf_speculate.new": ROOT / "new.py",
        "hf_speculate.folder": ROOT / "folder" / "__init__.py",
    }
    layers = layers_of(files)
    assert "hf_speculate.folder" not in layers
    assert layers["hf_speculate.config"] < layers["hf_speculate.new"] < layers["hf_speculate.cache"]
