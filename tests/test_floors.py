"""The rules between the packages that ruff does not know: imports go down, never sideways, never up."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 320

# Package or file -> layer. Imports go to a lower layer, or stay inside one package.
FLOORS = {
    "hf_speculate": 12,
    "hf_speculate.tools": 11,
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
    "hf_speculate.field_checks": 1,
    "hf_speculate.optional_imports": 1,
    "hf_speculate.types": 0,
    "hf_speculate.errors": 0,
    "hf_speculate.transfers": 0,
    "hf_speculate.triton_kernels": -1,
}
KERNELS = "hf_speculate.triton_kernels"
# transformers' names; torch's operators of single attention backends
MAY_USE_PRIVATE_NAMES = ("hf_speculate.compat", "hf_speculate.models.attention_backends")
NAMED_TUPLE_METHODS = {"_asdict", "_fields", "_make", "_replace"}  # public, whatever their names look like


def library_files() -> dict[str, Path]:
    """Module name -> file, with the kernels under the name they are installed as."""
    files = {}
    for folder, package in (("hf_speculate", "hf_speculate"), ("triton_kernels", KERNELS)):
        for path in sorted((ROOT / folder).rglob("*.py")):  # which follows no links
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join((package, *parts)).removesuffix(".__init__")] = path
    return files


def package_of(module: str) -> str | None:
    """The package that `module` lies in; None where the table has none."""
    if module == "hf_speculate":
        return module
    packages = [package for package in FLOORS if package != "hf_speculate" and f"{module}.".startswith(f"{package}.")]
    return max(packages, key=len, default=None)


def imported_modules(node: ast.AST, module: str, *, is_package: bool = False) -> list[str]:
    """Dotted names that an import statement reaches; a name imported from a package counts as lying in it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parts = module.split(".") if is_package else module.split(".")[:-1]
        anchor = parts[: len(parts) - (node.level - 1)]
        base = ".".join([*anchor, *([base] if base else [])])
    if base == "hf_speculate":  # `from hf_speculate import errors` reaches the package, not the front door
        names = [f"{base}.{alias.name}" for alias in node.names]
        return [name if package_of(name) else base for name in names]
    return [base]


def is_of(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def import_problems(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    package = package_of(module)
    if package is None:
        yield 1, f"{module} has no floor: add it to FLOORS"
        return
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    local = {inner for function in functions for inner in ast.walk(function) if inner is not function}
    for node in ast.walk(tree):
        for name in imported_modules(node, module, is_package=is_package):
            if is_of(name, "triton_kernels"):
                yield node.lineno, f"{name} is installed as {KERNELS}: import it by that name"
            if is_of(name, "triton") and package != KERNELS:
                yield node.lineno, "triton is imported inside triton_kernels only"
            if is_of(name, "transformers") and package == KERNELS:
                yield node.lineno, "triton_kernels knows tensors only: no transformers"
            if not is_of(name, "hf_speculate"):
                continue
            if package == KERNELS and isinstance(node, ast.ImportFrom) and not node.level:
                yield node.lineno, "imports inside triton_kernels are relative"
            if package != KERNELS and node in local:
                yield node.lineno, f"{name} is imported inside a function: imports stand at the top"
            target = package_of(name)
            if target is None:
                yield node.lineno, f"{name} has no floor: add it to FLOORS"
            elif FLOORS[target] > FLOORS[package]:
                yield node.lineno, f"{package} (floor {FLOORS[package]}) imports up: {name} (floor {FLOORS[target]})"
            elif target != package and FLOORS[target] == FLOORS[package]:
                yield node.lineno, f"{package} (floor {FLOORS[package]}) imports sideways: {name}"


def is_foreign(name: object, own: set[str]) -> bool:
    """Whether a name is private, and not one that the file itself gives."""
    if not isinstance(name, str) or name in own or name in NAMED_TUPLE_METHODS:
        return False
    return name.startswith("_") and not name.startswith("__")


def private_name_problems(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    if module in MAY_USE_PRIVATE_NAMES:
        return
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    of_self = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")]
    own |= {node.attr for node in of_self if isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [part for name in imported_modules(node, module) for part in name.split(".")]
            names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if names[0] == "transformers" and any(is_foreign(name, set()) for name in names):
                yield node.lineno, f"a private name of transformers, for compat.py: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and node not in of_self and is_foreign(node.attr, own):
            yield node.lineno, f"a foreign private name: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            found = is_foreign(getattr(node.args[1], "value", None), own)
            yield from [(node.lineno, f"a foreign private name: {ast.unparse(node)}")] * found


def patch_problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Assignments to an attribute of something imported."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        base = None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            base = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            base = node.args[0] if node.args else None
        while isinstance(base, ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name) and base.id in imported:
            yield node.lineno, f"assigns to an attribute of something imported: {ast.unparse(node)}"


def problems_of(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Everything that `source` does against the rules, were it the module `module`."""
    tree = ast.parse(source)
    found = [*import_problems(tree, module, is_package), *private_name_problems(tree, module)]
    num_lines = len(source.splitlines())
    found += [
        *patch_problems(tree),
        *[(num_lines, f"{num_lines} lines: at most {MAX_LINES}")] * (num_lines > MAX_LINES),
    ]
    return [f"{module}:{line}: {text}" for line, text in sorted(found)]


def test_every_module_keeps_the_rules() -> None:
    problems = [
        problem
        for module, path in library_files().items()
        for problem in problems_of(path.read_text(), module, is_package=path.name == "__init__.py")
    ]
    assert not problems, "\n".join(problems)


BAD = [
    ("engine.decoder", "from hf_speculate.generation.enable import enable", "imports up"),
    ("types", "import hf_speculate.transfers", "imports sideways"),
    ("newpackage", "import torch", "has no floor"),
    ("cache.base", "def f():\n    from hf_speculate.types import KVState", "inside a function"),
    ("engine.builder", "import triton_kernels", "is installed as"),
    ("engine.decoder", "def f():\n    import triton", "inside triton_kernels only"),
    ("triton_kernels.reference", "import transformers", "knows tensors only"),
    ("triton_kernels.reference", "from hf_speculate.triton_kernels.types import Verdict", "are relative"),
    ("engine.builder", "from transformers.generation.utils import _x", "private name of transformers"),
    ("engine.builder", "def f(self):\n    return self.model._cache", "foreign private name"),
    ("engine.builder", "def f(model):\n    return getattr(model, '_is_stateful', False)", "foreign private name"),
    (
        "engine.builder",
        "from transformers import GenerationMixin\nGenerationMixin.generate = None",
        "something imported",
    ),
    ("engine.builder", "import torch\nsetattr(torch.nn, 'x', 1)", "something imported"),
    ("stats", "x = 1\n" * (MAX_LINES + 1), "at most"),
]
GOOD = [
    ("engine.decoder", "from hf_speculate import errors, types"),
    ("triton_kernels.rejection", "from .types import Verdict\ndef f():\n    import triton"),
    ("compat", "from transformers.utils import _x\ndef f(model):\n    return model._is_stateful"),
    ("engine.verification", "def f(keys):\n    return keys._replace(rounds=1)"),
    ("stats", "class A:\n    def f(self, other):\n        self._n = 1\n        return other._n"),
]


@pytest.mark.parametrize(("module", "source", "text"), BAD)
def test_the_checker_finds(module: str, source: str, text: str) -> None:
    problems = problems_of(source, f"hf_speculate.{module}")
    assert len(problems) == 1, problems
    assert text in problems[0]


@pytest.mark.parametrize(("module", "source"), GOOD)
def test_the_checker_allows(module: str, source: str) -> None:
    assert problems_of(source, f"hf_speculate.{module}") == []
