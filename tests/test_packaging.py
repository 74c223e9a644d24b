"""Test built packages, pinned versions and public names."""

import ast
import configparser
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import hf_speculate
from hf_speculate.tools.cli.options import Serve
from tests.support.shown_commands import problems_in
from tests.test_floors import imported_modules, library_files
from tests.tools.dataset.common import save_pair

ROOT = Path(__file__).parents[1]
REPOSITORY_URL = "https://example.org/owner/hf_speculate"


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirement_names(text: str) -> set[str]:
    return {re.split(r"[<>=\[ ]", line.strip())[0] for line in text.splitlines() if line.strip()}


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def run(*command: str | Path, **options: Any) -> str:
    result = subprocess.run(command, **{"cwd": ROOT, **options}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_python(*arguments: str | Path) -> None:
    run(sys.executable, *arguments)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a source distribution outside the repository, as for a package index."""
    folder = tmp_path_factory.mktemp("sdist")
    run_python(
        "setup.py", "-q", "egg_info", "-e", folder, "sdist", "--formats=gztar", "--dist-dir", folder
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    words = ["-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source]
    run(sys.executable, *words, env=os.environ | {"REPOSITORY_URL": REPOSITORY_URL})
    (wheel,) = folder.glob(f"hf_speculate-{hf_speculate.__version__}-*.whl")
    return wheel


def test_wheel_holds_the_package_with_its_kernels(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"hf_speculate/{name}" for name in python_files("hf_speculate")}
    templates = {
        "bench/report/page.html",
        "hub/card.md.jinja",
        "hub/generate.py.jinja",
        "server/page.html",
    }
    assert names == expected | {
        "hf_speculate/py.typed",
        *(f"hf_speculate/tools/{name}" for name in templates),
    }
    assert os.readlink(ROOT / "triton_kernels") == os.path.join("hf_speculate", "kernels")


def test_description_on_an_index_has_absolute_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = archive.read(name).decode()
    links = re.findall(r"""\]\(([^)]+)\)|\bsrc(?:set)?="([^"]+)""", metadata)
    assert [link for pair in links if not re.match(r"https://|#", link := "".join(pair))] == []
    assert f"]({REPOSITORY_URL}/blob/v{hf_speculate.__version__}/docs/quickstart.md)" in metadata
    assert f"Project-URL: Source, {REPOSITORY_URL}\n" in metadata


def test_source_distribution_holds_no_tests(wheel: Path) -> None:
    (folder,) = wheel.parent.glob("hf_speculate-*/")
    assert (folder / "setup.py").is_file()
    assert not (folder / "tests").exists()


def test_container_build_finds_its_files_and_options() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    steps = re.findall(r"^([A-Z]+) (.*)$", text, re.M)
    (entry,) = [json.loads(words) for step, words in steps if step == "ENTRYPOINT"]
    assert problems_in(shlex.join([*entry, "TARGET", "--draft", "DRAFT"])) == []
    (port,) = {*re.findall(r"(?:^EXPOSE |127\.0\.0\.1:)(\d+)", text, re.M)}
    assert int(port) == Serve(target="TARGET").port
    copied = [
        words.split()[:-1] for step, words in steps if step == "COPY" and "--from=" not in words
    ]
    context = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert {name for names in copied for name in names} == context
    assert [name for name in context if not (ROOT / name).exists()] == []


def python_files(folder: str) -> set[str]:
    return {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py")}


BESIDE_A_FOREIGN_PACKAGE = """
import sys
from pathlib import Path

import triton_kernels

import hf_speculate.kernels

assert Path(sys.prefix).resolve() in Path(triton_kernels.__file__).resolve().parents
assert triton_kernels.matmul() == "foreign"
assert hf_speculate.kernels is not triton_kernels
assert sys.modules["triton"] is None
"""

# Modules that a plain installation does not have.
EXTRAS = "accelerate datasets fastapi httpx kernels matplotlib openai pandas peft "
EXTRAS += "prometheus_client ray torchao triton uvicorn xgrammar"


@pytest.mark.slow
def test_wheel_works_beside_another_triton_kernels_package(wheel: Path, tmp_path: Path) -> None:
    """Install next to Triton's own distribution, which contains a package of the same name."""
    run_python("-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # Take the wheel's requirements from this environment, and run each import line.
    without = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS.split()!r}))\n"
    (packages / "borrowed.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n{without}")
    (packages / "triton_kernels").mkdir()
    (packages / "triton_kernels" / "__init__.py").write_text(
        'def matmul():\n    return "foreign"\n'
    )
    run_python(
        "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel
    )
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    target, draft = save_pair(tmp_path)
    away = {"cwd": tmp_path, "env": alone}
    run(python, "-c", BESIDE_A_FOREIGN_PACKAGE, **away)
    run(python, "-I", ROOT / "tests" / "installed_wheel.py", **away)
    words = [
        python.with_name("hf-speculate"),
        "generate",
        target,
        "def",
        "-n",
        "8",
        "--device",
        "cpu",
    ]
    text = run(*words, **away)
    assert text.strip()
    assert run(*words, "-d", draft, "-k", "3", **away) == text


def test_library_imports_only_its_requirements() -> None:
    required = requirement_names(setup_cfg()["options"]["install_requires"])
    nodes = [
        node for path in library_files().values() for node in ast.walk(ast.parse(path.read_text()))
    ]
    imported = {name.split(".")[0] for node in nodes for name in imported_modules(node)}
    # The kernels are imported only by a call that uses them, and only they import Triton. The other
    # modules come from extras.
    optional = {
        "accelerate",
        "fastapi",
        "matplotlib",
        "pandas",
        "pydantic",
        "ray",
        "starlette",
        "triton",
        "uvicorn",
        "xgrammar",
    }
    assert imported - {*sys.stdlib_module_names, "hf_speculate"} - optional == required


def test_version_is_defined_once_and_requirements_are_pinned() -> None:
    parser = setup_cfg()
    assert parser["metadata"]["version"] == "attr: hf_speculate.__version__"
    assert f"## {hf_speculate.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    named = requirement_names(parser["options"]["install_requires"])
    for requirements in parser["options.extras_require"].values():
        named |= requirement_names(requirements)
    named, pinned = (
        {re.sub(r"[-_.]+", "-", name).lower() for name in names} for names in (named, pins())
    )
    assert named - {"hf-speculate"} <= pinned
    (line,) = [
        line for line in parser["options"]["install_requires"].split("\n") if "transformers" in line
    ]
    oldest = pins("constraints-oldest.txt")["transformers"].removesuffix(".0")
    assert line == f"transformers>={oldest},<6"
    assert f"\nTORCH ?= torch=={pins()['torch']}\n" in (ROOT / "Makefile").read_text()
    assert f"\nARG TORCH=torch=={pins()['torch']}\n" in (ROOT / "Dockerfile").read_text()


def test_import_changes_nothing_and_needs_no_triton() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib, pkgutil, transformers\n"
        "from transformers import GenerationMixin, PreTrainedModel\n"
        "classes = (GenerationMixin, PreTrainedModel, transformers.GenerationConfig)\n"
        "before = [dict(vars(one)) for one in classes]\n"
        "import hf_speculate, hf_speculate.kernels\n"
        "for module in pkgutil.walk_packages(hf_speculate.__path__, 'hf_speculate.'):\n"
        "    if not module.name.startswith('hf_speculate.kernels.'):\n"
        "        importlib.import_module(module.name)\n"
        "assert [dict(vars(one)) for one in classes] == before\n"
    )
    run_python("-c", script)


HEAVY = ("rich", "typer", "jinja2", "huggingface_hub.hf_api", "matplotlib", "transformers", "torch")


def test_import_of_the_package_loads_no_library():
    code = (
        "import sys, hf_speculate\n"
        "print([name for name in sys.modules if name.startswith('hf_speculate.')])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
        "hf_speculate.enable, hf_speculate.generate\n"
        "print([name for name in sys.modules if name.startswith(('hf_speculate.tools', 'typer', "
        "'matplotlib'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" * 3


def test_dir_lists_public_names_that_import():
    assert dir(hf_speculate) == sorted([*hf_speculate.__all__, "__version__"])
    for name in hf_speculate.__all__:
        value = getattr(hf_speculate, name)
        is_error = isinstance(value, type) and issubclass(value, Exception)
        assert value.__module__.startswith("hf_speculate.errors" if is_error else "hf_speculate.")
        assert pickle.loads(pickle.dumps(value)) is value
