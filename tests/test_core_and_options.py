"""The core knows none of its options: it imports none of them, and a plain call runs none."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from itertools import islice
from pathlib import PurePosixPath

import pytest

from hf_speculate.engine.call import Call
from tests.test_floors import ROOT, library_files

FOLDER = "options"  # of the options, below `hf_speculate`
# Core is also what decoding with any draft model needs to be exact: second scoring, the draft guard and its faults, the
# context of models, the probe of wrapped decoders and processors of the encoder's ids.
NOT_CORE = ("tools/", "__init__.py")  # may import options; the public names are imported on first use
# The imports that options may have of options; on some devices, graphs wait for what `hf-speculate doctor` has seen.
BETWEEN_OPTIONS = {("heads", "compiled"), ("candidates", "recurrent"), ("compiled", "verdicts")}

BUILDER, MAX_IMPORTS, MAX_CALL_FIELDS = "engine/builder.py", 15, 16

# What a plain greedy call may run and load at most, the `__init__` of packages and the kernels not counted.
MOST = {"files run": 93, "lines run": 11_922, "modules loaded": 111, "lines loaded": 12_836}


def option_of(path: str) -> str | None:
    """The option that a file of the library belongs to; None for the core and the tools."""
    parts = PurePosixPath(path).parts
    return parts[1] if parts[0] == FOLDER and len(parts) > 2 else None


def sources() -> dict[str, str]:
    """File below `hf_speculate` -> its text, without the kernels."""
    library, kernels = ROOT / "hf_speculate", ROOT / "triton_kernels"
    paths = (path for path in library_files().values() if not path.is_relative_to(kernels))
    return {path.relative_to(library).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@cache
def imported_names(source: str) -> list[list[str]]:
    """Dotted names that each import of a source may mean, wherever it stands; the first one that is a module counts."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [[alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [[f"{node.module}.{alias.name}", node.module] for alias in node.names]
    return names


def imports_of(source: str, files: Mapping[str, str]) -> Iterator[str]:
    """The files of the library that a source imports."""
    for names in imported_names(source):
        bases = [name.removeprefix("hf_speculate.").replace(".", "/") for name in names]
        matches = (path for base in bases for path in (f"{base}.py", f"{base}/__init__.py") if path in files)
        yield from islice(matches, 1)


def option_imports(files: Mapping[str, str]) -> set[tuple[str, str]]:
    """(importing file, imported file) of every import of an option by the core, or by another option in its folder."""
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
    return [f"{path} must not import {imported} ({option_of(imported)})" for path, imported in sorted(found)]


def decisions_of(source: str, files: Mapping[str, str]) -> list[str]:
    """What a source does that only constructs what a plan says: it branches on nothing, and knows the parts alone."""
    branches = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If | ast.IfExp | ast.Match)]
    problems = [f"line {node.lineno} decides" for node in branches]
    num_imports = len(set(imports_of(source, files)))
    return problems + [f"{num_imports} imports: at most {MAX_IMPORTS}"] * (num_imports > MAX_IMPORTS)


def figures(run: Mapping[str, int], loaded: Mapping[str, int]) -> dict[str, int]:
    """The figures that `MOST` bounds, of a traced call: file -> lines."""
    return dict(zip(MOST, (len(run), sum(run.values()), len(loaded), sum(loaded.values())), strict=True))


def trace_problems(run: Mapping[str, int], loaded: Mapping[str, int]) -> list[str]:
    """What a traced call runs and loads beyond the bounds, or of the options' folder."""
    too_many = [f"{num} {name}: at most {MOST[name]}" for name, num in figures(run, loaded).items() if num > MOST[name]]
    return too_many + [f"{path} is loaded" for path in sorted(loaded) if path.startswith(f"{FOLDER}/")]


def test_the_core_imports_no_option():
    assert not (problems := import_problems(option_imports(sources()))), "\n".join(problems)


@pytest.mark.parametrize(
    ("path", "line", "imported"),
    [
        (
            "engine/decoder.py",
            "from hf_speculate.options.compiled.graphs import x",
            "options/compiled/graphs.py",
        ),
        ("engine/decoder.py", "from hf_speculate.options.compiled import graphs", "options/compiled/graphs.py"),
        (
            "engine/decoder.py",
            "if x:\n    import hf_speculate.options.compiled.graphs",
            "options/compiled/graphs.py",
        ),
        ("types.py", "from hf_speculate.options.heads import load", "options/heads/load.py"),
        ("cache/base.py", "from hf_speculate.options.spans.rule import x", "options/spans/rule.py"),
        ("options/spans/rule.py", "import hf_speculate.options.cpu.top", "options/cpu/top.py"),
        ("options/spans/rule.py", "from hf_speculate.options.spans.other import x", None),
        ("options/heads/source.py", "from hf_speculate.options.compiled.language_model import x", None),
        ("tools/checks/pair.py", "from hf_speculate.options.sources.hybrid import HybridDrafter", None),
        ("engine/decoder.py", "from hf_speculate.verify.base import Verifier", None),
    ],
)
def test_an_added_import_is_found(path, line, imported):
    more = dict.fromkeys(("options/spans/rule.py", "options/spans/other.py", "options/cpu/top.py"), "")
    files = {**sources(), **more, "options/heads/source.py": ""}
    imports = option_imports({**files, path: f"{files[path]}\n{line}\n"})
    assert imports == ({(path, imported)} if imported else set())
    assert len(import_problems(imports)) == len(imports)


def test_the_builder_only_constructs():
    files = sources()
    assert not decisions_of(files[BUILDER], files)
    assert len(decisions_of(files["engine/plan.py"], files)) > 10
    many = "\n".join(f"import hf_speculate.{path.removesuffix('.py').replace('/', '.')}" for path in files)
    assert len(decisions_of(many, files)) == 1


def test_a_call_has_few_fields():
    assert len(fields(Call)) <= MAX_CALL_FIELDS


def test_a_plain_greedy_call_runs_and_loads_little():
    command = [sys.executable, "-m", "tests.traced_call"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    traced = json.loads(done.stdout)
    print(", ".join(f"{num} {name}" for name, num in figures(**traced).items()))
    assert not (problems := trace_problems(**traced)), "\n".join(problems)
    assert traced["run"].keys() <= traced["loaded"].keys()
    assert {"engine/decoder.py", "draft/model.py", "verify/kernel.py"} <= traced["run"].keys()


def test_a_call_that_runs_or_loads_more_is_found():
    files = {f"{number}.py": 1 for number in range(max(MOST.values()) + 1)}
    assert len(trace_problems(files, files)) == len(MOST)
    assert trace_problems({}, {"options/spans/rule.py": 1}) == ["options/spans/rule.py is loaded"]
