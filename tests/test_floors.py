"""The rules between the packages: imports go down, never sideways, never up."""

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
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "hf_speculate" and parts[0] == "triton_kernels":
                continue  # the link to the folder that is walked by itself
            name = ".".join((package, *parts)).removesuffix(".__init__")
            files[name] = path
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


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE_METHODS


def local_nodes(tree: ast.Module) -> set[ast.AST]:
    """Every node that runs only when a function is called."""
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    return {inner for function in functions for inner in ast.walk(function) if inner is not function}


def import_problems(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    package = package_of(module)
    if package is None:
        yield 1, f"{module} has no floor: add it to FLOORS"
        return
    local = local_nodes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and package != KERNELS:
            yield node.lineno, "relative import: write hf_speculate.…"
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
            yield from floor_problems(node, name, package)


def floor_problems(node: ast.AST, name: str, package: str) -> Iterator[tuple[int, str]]:
    target = package_of(name)
    if target is None:
        yield node.lineno, f"{name} has no floor: add it to FLOORS"
    elif FLOORS[target] > FLOORS[package]:
        yield node.lineno, f"{package} (floor {FLOORS[package]}) imports up: {name} (floor {FLOORS[target]})"
    elif target != package and FLOORS[target] == FLOORS[package]:
        yield node.lineno, f"{package} (floor {FLOORS[package]}) imports sideways: {name}"


def names_defined(tree: ast.Module) -> set[str]:
    """Private names that the file itself gives to its classes, instances and functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return names


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_name_problems(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    if module in MAY_USE_PRIVATE_NAMES:
        return
    own = names_defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported_modules(node, module):
                inner = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
                if is_of(name, "transformers") and any(map(is_private, [*name.split("."), *inner])):
                    yield (
                        node.lineno,
                        f"a private name of transformers, for compat.py: {ast.unparse(node)}",
                    )
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if not is_self(node.value) and node.attr not in own:
                yield node.lineno, f"a foreign private name: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.args[1] if len(node.args) > 1 else None
            is_reflection = node.func.id in ("getattr", "setattr", "hasattr", "delattr") and isinstance(
                name, ast.Constant
            )
            if is_reflection and is_private(str(name.value)) and name.value not in own:
                yield node.lineno, f"a foreign private name: {ast.unparse(node)}"


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


def statement_problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert in the library: raise an error with a message"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "print in the library: use a logger"
        elif isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            is_blind = any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)
            if is_blind and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                yield node.lineno, "blind except: name the error, or raise again"


def form_problems(tree: ast.Module, source: str) -> Iterator[tuple[int, str]]:
    num_lines = len(source.splitlines())
    if num_lines > MAX_LINES:
        yield num_lines, f"{num_lines} lines: at most {MAX_LINES}"
    first_line = (ast.get_docstring(tree) or "").split("\n")[0]
    if tree.body and (not first_line.endswith(".") or ". " in first_line):
        yield 1, f"the docstring's first line must be one sentence, got {first_line!r}"


def problems_of(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Everything that `source` does against the rules, were it the module `module`."""
    tree = ast.parse(source)
    found = [
        *import_problems(tree, module, is_package),
        *private_name_problems(tree, module),
        *patch_problems(tree),
        *statement_problems(tree),
        *form_problems(tree, source),
    ]
    return [f"{module}:{line}: {text}" for line, text in sorted(found)]


def top_level_imports(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Names that importing `module` imports, `from a import b` as both `a` and `a.b`."""
    tree = ast.parse(source)
    local = local_nodes(tree)
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in local:
            reached = imported_modules(node, module, is_package=is_package)
            names.update(reached)
            if isinstance(node, ast.ImportFrom):
                names.update(f"{base}.{alias.name}" for base in reached for alias in node.names)
    return names


def needs_triton(imports: dict[str, set[str]]) -> set[str]:
    """Modules that cannot be imported without triton, given each module's top-level imports."""
    needing = {module for module, names in imports.items() if any(is_of(name, "triton") for name in names)}
    while more := {module for module, names in imports.items() if names & needing} - needing:
        needing |= more
    return needing


def test_every_module_keeps_the_rules() -> None:
    problems = [
        problem
        for module, path in library_files().items()
        for problem in problems_of(path.read_text(), module, is_package=path.name == "__init__.py")
    ]
    assert not problems, "\n".join(problems)


def test_nothing_but_single_kernel_files_needs_triton() -> None:
    imports = {
        module: top_level_imports(path.read_text(), module, is_package=path.name == "__init__.py")
        for module, path in library_files().items()
    }
    needing = needs_triton(imports)
    assert all(is_of(module, KERNELS) and module != KERNELS for module in needing), needing


DOC = '"""One sentence."""\n'
BAD = [
    ("engine.decoder", "from hf_speculate.generation.enable import enable", "imports up"),
    ("types", "import hf_speculate.transfers", "imports sideways"),
    ("draft.model", "from hf_speculate.verify.base import Verifier", "imports up"),
    ("verify.base", "from hf_speculate.schedule.base import Schedule", "imports sideways"),
    ("engine.builder", "from hf_speculate import enable", "imports up"),
    ("newpackage", "import torch", "has no floor"),
    ("engine.builder", "from hf_speculate.newpackage import x", "has no floor"),
    ("draft.model", "from .base import Drafter", "relative import"),
    ("cache.base", "def f():\n    from hf_speculate.types import KVState", "inside a function"),
    ("engine.builder", "import triton_kernels", "is installed as"),
    ("engine.decoder", "def f():\n    import triton", "inside triton_kernels only"),
    ("triton_kernels.reference", "import transformers", "knows tensors only"),
    ("triton_kernels.reference", "from hf_speculate.triton_kernels.types import Verdict", "are relative"),
    ("triton_kernels.reference", "import hf_speculate.errors", "imports up"),
    ("engine.builder", "from transformers.generation.utils import _x", "private name of transformers"),
    ("engine.builder", "def f(model):\n    return model._is_stateful", "foreign private name"),
    ("engine.builder", "def f(self):\n    return self.model._cache", "foreign private name"),
    ("models.folded_attention", "def f(config):\n    return config._attn_implementation", "foreign private name"),
    ("engine.builder", "def f(model):\n    return getattr(model, '_is_stateful', False)", "foreign private name"),
    (
        "engine.builder",
        "from transformers import GenerationMixin\nGenerationMixin.generate = None",
        "something imported",
    ),
    ("engine.builder", "import torch\nsetattr(torch.nn, 'x', 1)", "something imported"),
    ("stats", "assert True", "assert in the library"),
    ("stats", "print(1)", "print in the library"),
    ("stats", "try:\n    pass\nexcept:\n    pass", "blind except"),
    ("stats", "try:\n    pass\nexcept (ValueError, Exception):\n    pass", "blind except"),
    ("stats", "x = 1\n" * MAX_LINES, "at most"),
]
GOOD = [
    ("draft.model", "from hf_speculate.draft.base import Drafter\nfrom hf_speculate.cache.base import KVCache"),
    ("types", "from hf_speculate.triton_kernels.types import Verdict"),
    ("engine.decoder", "from hf_speculate import errors, types"),
    ("triton_kernels.rejection", "from .types import Verdict\ndef f():\n    import triton"),
    ("compat", "from transformers.utils import _x\ndef f(model):\n    return model._is_stateful"),
    ("engine.verification", "def f(keys):\n    return keys._replace(rounds=1)"),
    ("stats", "class A:\n    def f(self, other):\n        self._n = 1\n        return other._n"),
    ("stats", "try:\n    pass\nexcept BaseException:\n    x = 1\n    raise"),
]


@pytest.mark.parametrize(("module", "source", "text"), BAD)
def test_the_checker_finds(module: str, source: str, text: str) -> None:
    problems = problems_of(DOC + source, f"hf_speculate.{module}")
    assert len(problems) == 1, problems
    assert text in problems[0]


@pytest.mark.parametrize(("module", "source"), GOOD)
def test_the_checker_allows(module: str, source: str) -> None:
    assert problems_of(DOC + source, f"hf_speculate.{module}") == []


@pytest.mark.parametrize("docstring", ["", '"""No full stop"""\n', '"""One. Two."""\n'])
def test_the_checker_reads_docstrings(docstring: str) -> None:
    assert "one sentence" in problems_of(docstring + "x = 1", "hf_speculate.stats")[0]


def test_the_checker_follows_triton_through_imports() -> None:
    kernel = top_level_imports("import triton.language as tl", f"{KERNELS}.block")
    eager = top_level_imports("from . import block", KERNELS, is_package=True)
    lazy = top_level_imports("def f():\n    from . import block", KERNELS, is_package=True)
    assert needs_triton({f"{KERNELS}.block": kernel, KERNELS: eager}) == {f"{KERNELS}.block", KERNELS}
    assert needs_triton({f"{KERNELS}.block": kernel, KERNELS: lazy}) == {f"{KERNELS}.block"}
