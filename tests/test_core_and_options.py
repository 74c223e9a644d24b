"""Test that the core imports no options."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import PurePosixPath

import pytest

from tests.test_floors import ROOT, library_files

FOLDER = "options"  # folder of options under `hf_speculate`
# The core contains everything that exact decoding with any draft model needs, including second
# scoring, faulty drafts, context lengths, probes for wrapped decoders, and processors that read
# encoder ids.
NOT_CORE = ("tools/", "__init__.py")  # may import options; public names are imported on first use
# Imports that are allowed between options.
BETWEEN_OPTIONS = {("heads", "compiled"), ("candidates", "recurrent")}


def option_of(path: str) -> str | None:
    """Return the option that a library file belongs to, or None for the core and the tools."""
    parts = PurePosixPath(path).parts
    return parts[1] if parts[0] == FOLDER and len(parts) > 2 else None


def sources() -> dict[str, str]:
    """Return the text of each library file except kernels, by path under `hf_speculate`."""
    library, kernels = ROOT / "hf_speculate", ROOT / "hf_speculate" / "kernels"
    paths = (path for path in library_files().values() if not path.is_relative_to(kernels))
    return {
        path.relative_to(library).as_posix(): path.read_text(encoding="utf-8") for path in paths
    }


@cache
def imported_names(source: str) -> list[list[str]]:
    """Return candidate modules for each import in a source; the first existing one counts."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [[alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [[f"{node.module}.{alias.name}", node.module] for alias in node.names]
    return names


def imports_of(source: str, files: Mapping[str, str]) -> Iterator[str]:
    """Return the library files that a source imports."""
    for names in imported_names(source):
        bases = [name.removeprefix("hf_speculate.").replace(".", "/") for name in names]
        matches = (
            path
            for base in bases
            for path in (f"{base}.py", f"{base}/__init__.py")
            if path in files
        )
        yield from islice(matches, 1)


def option_imports(files: Mapping[str, str]) -> set[tuple[str, str]]:
    """Find imports of an option outside its folder, as (importing file, imported file)."""
    imports = set()
    for path, source in files.items():
        if path.startswith(NOT_CORE):
            continue
        own = option_of(path)
        for imported in imports_of(source, files):
            option = option_of(imported)
            if option is not None and option != own and (own, option) not in BETWEEN_OPTIONS:
                imports.add((path, imported))
    return imports


def import_problems(found: Iterable[tuple[str, str]]) -> list[str]:
    return [
        f"{path} must not import {imported} ({option_of(imported)})"
        for path, imported in sorted(found)
    ]


def test_core_imports_no_option():
    assert not (problems := import_problems(option_imports(sources()))), "\n".join(problems)


@pytest.mark.parametrize(
    ("path", "line", "imported"),
    [
        (
            "engine/decoder.py",
            "from hf_speculate.options.compiled.graphs import x",
            "options/compiled/graphs.py",
        ),
        (
            "engine/decoder.py",
            "from hf_speculate.options.compiled import graphs",
            "options/compiled/graphs.py",
        ),
        (
            "engine/decoder.py",
            "if x:\n    import hf_speculate.options.compiled.graphs",
            "options/compiled/graphs.py",
        ),
        ("types.py", "from hf_speculate.options.heads import load", "options/heads/load.py"),
        ("cache/base.py", "from hf_speculate.options.spans.rule import x", "options/spans/rule.py"),
        ("options/spans/rule.py", "import hf_speculate.options.cpu.top", "options/cpu/top.py"),
        ("options/spans/rule.py", "from hf_speculate.options.spans.other import x", None),
        (
            "options/heads/source.py",
            "from hf_speculate.options.compiled.language_model import x",
            None,
        ),
        (
            "tools/checks/pair.py",
            "from hf_speculate.options.sources.hybrid import HybridDrafter",
            None,
        ),
        ("engine/decoder.py", "from hf_speculate.verify.base import Verifier", None),
    ],
)
def test_added_import_is_found(path, line, imported):
    more = dict.fromkeys(
        ("options/spans/rule.py", "options/spans/other.py", "options/cpu/top.py"), ""
    )
    files = {**sources(), **more, "options/heads/source.py": ""}
    imports = option_imports({**files, path: f"{files[path]}\n{line}\n"})
    assert imports == ({(path, imported)} if imported else set())
    assert len(import_problems(imports)) == len(imports)
