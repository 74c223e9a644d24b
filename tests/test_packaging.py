"""What is built, pinned and shown to users fits together."""

import ast
import configparser
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hf_speculate
from tests.tools.bench.fakes import save_pair

ROOT = Path(__file__).parents[1]
NOT_INSTALLED = {"hf_speculate"}
STANDARD = set(sys.stdlib_module_names)


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirement_names(text: str) -> set[str]:
    return {re.split(r"[<>=\[ ]", line.strip())[0] for line in text.splitlines() if line.strip()}


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def run_python(*arguments: str | Path) -> None:
    result = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def source_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, unpacked: what a wheel is built from away from the repository."""
    folder = tmp_path_factory.mktemp("sdist")
    egg_base = tmp_path_factory.mktemp("egg")
    arguments = ["egg_info", "--egg-base", str(egg_base), "sdist", "--formats=gztar", "--dist-dir", str(folder)]
    run_python("-c", f"import sys; sys.argv[1:] = {arguments!r}; import setuptools; setuptools.setup()")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source_copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source_copy)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_package_with_its_kernels_inside(wheel_names: set[str]) -> None:
    assert all(name.startswith("hf_speculate/") for name in wheel_names)
    folders = {"hf_speculate": ROOT / "hf_speculate", "hf_speculate/triton_kernels": ROOT / "triton_kernels"}
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in folders.items()
        for path in folder.rglob("*.py")
    }
    templates = {"bench/report/page.html", "hub/card.md.jinja", "hub/generate.py.jinja"}
    expected |= {"hf_speculate/py.typed", *(f"hf_speculate/tools/{name}" for name in templates)}
    assert expected == wheel_names


IN_A_FRESH_ENVIRONMENT = """
import sys
from pathlib import Path

import torch
import triton_kernels
from transformers import LlamaConfig, LlamaForCausalLM

import hf_speculate
from hf_speculate.tools.bench.report import write_html

environment = Path(sys.prefix).resolve()
assert all(environment in Path(one.__file__).resolve().parents for one in (hf_speculate, triton_kernels))
assert triton_kernels.matmul() == "foreign"
assert hf_speculate.triton_kernels.verify_greedy is not None
assert hf_speculate.triton_kernels is not triton_kernels
assert all(sys.modules[name] is None for name in EXTRAS)

sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
torch.manual_seed(0)
model, draft = (LlamaForCausalLM(LlamaConfig(**sizes)).double().eval() for _ in range(2))
call = dict(input_ids=torch.tensor([[3, 4, 5]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
plain = model.generate(**call)
stats = hf_speculate.SpeculationStats()
ours = hf_speculate.enable(model).generate(**call, assistant_model=draft, speculation_stats=stats)
assert torch.equal(plain, ours)
assert stats.verifier == "greedy"
write_html({"methods": [{"name": "plain"}]}, environment / "report.html")
"""

# What a plain installation does not bring, by the names of the modules. A .pth file's line that imports is run.
EXTRAS = [
    "accelerate",
    "fastapi",
    "httpx",
    "kernels",
    "matplotlib",
    "openai",
    "outlines_core",
    "pandas",
    "peft",
    "prometheus_client",
    "ray",
    "torchao",
    "triton",
    "uvicorn",
    "xgrammar",
]
WITHOUT_EXTRAS = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"


@pytest.mark.slow
def test_the_wheel_works_beside_a_foreign_triton_kernels_and_without_extras(wheel: Path, tmp_path: Path) -> None:
    """Triton's own distribution brings a package of that name; neither may stand on the other."""
    run_python("-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # What the wheel requires is read from this environment; a line of a .pth file brings no editable installs along.
    (packages / "borrowed.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    (packages / "without_extras.pth").write_text(WITHOUT_EXTRAS)
    foreign = packages / "triton_kernels" / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text('def matmul():\n    return "foreign"\n')
    run_python("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script, (target, draft) = python.with_name("hf-speculate"), save_pair(tmp_path)

    def run(*command: str | Path) -> str:
        result = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    run(python, "-c", f"EXTRAS = {EXTRAS!r}\n{IN_A_FRESH_ENVIRONMENT}")
    assert "hf-speculate check" in run(script, "check", "--help")
    words = [script, "generate", target, "def", "-n", "8", "--device", "cpu"]
    text = run(*words)
    assert text.strip()
    assert run(*words, "-d", draft, "-k", "3") == text
    assert foreign.read_text().startswith("def matmul")


def test_the_kernels_are_linked_by_a_relative_path() -> None:
    link = ROOT / "hf_speculate" / "triton_kernels"
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("..", "triton_kernels")


def test_the_version_is_said_once() -> None:
    version = setup_cfg()["metadata"]["version"]
    assert hf_speculate.__version__ == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_command_is_installed_where_it_lies() -> None:
    (line,) = setup_cfg()["options.entry_points"]["console_scripts"].strip().splitlines()
    name, _, place = line.partition(" = ")
    module, function = place.split(":")
    assert name == "hf-speculate"
    assert callable(getattr(importlib.import_module(module), function))


def test_the_library_imports_only_what_it_requires() -> None:
    required = requirement_names(setup_cfg()["options"]["install_requires"])
    imported = set()
    for folder in ("hf_speculate", "triton_kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add(node.module.split(".")[0])
    # The kernels import Triton, and nothing imports the kernels but a call that asks for them; others are extras.
    optional = {"accelerate", "fastapi", "matplotlib", "pandas", "pydantic", "ray", "starlette", "triton", "uvicorn"}
    assert imported - STANDARD - NOT_INSTALLED - optional == required


def test_everything_that_setup_cfg_names_is_pinned() -> None:
    parser = setup_cfg()
    named = requirement_names(parser["options"]["install_requires"])
    for requirements in parser["options.extras_require"].values():
        named |= requirement_names(requirements)
    pinned = {normalised(name) for name in pins()}
    assert {normalised(name) for name in named} - {"hf-speculate"} <= pinned


def test_the_oldest_transformers_that_is_tested_is_the_oldest_that_is_allowed() -> None:
    (line,) = [line for line in setup_cfg()["options"]["install_requires"].split("\n") if "transformers" in line]
    oldest = pins("constraints-oldest.txt")["transformers"]
    assert f"transformers>={oldest.removesuffix('.0')},<6" == line
    assert f"transformers {oldest.removesuffix('.0')} up to 6" in (ROOT / "README.md").read_text()


def test_make_installs_the_pinned_torch() -> None:
    (torch_default,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert torch_default == f"torch=={pins()['torch']}"


def test_importing_changes_nothing_and_needs_no_triton() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import transformers\n"
        "from transformers import GenerationMixin, PreTrainedModel\n"
        "classes = (GenerationMixin, PreTrainedModel, transformers.GenerationConfig)\n"
        "before = [dict(vars(one)) for one in classes]\n"
        "import hf_speculate, hf_speculate.triton_kernels\n"
        "assert [dict(vars(one)) for one in classes] == before\n"
    )
    run_python("-c", script)


def test_the_readme_is_short_and_so_is_its_example() -> None:
    """That it runs is for `tests/test_pages.py`."""
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"^## Example\n\n```python\n(.*?)^```$", text, re.M | re.S)
    assert len(code.splitlines()) <= 10
    assert len(text.splitlines()) <= 150


def test_the_readme_commands_are_make_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for name in ("README.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"\bmake ([a-z-]+)`", (ROOT / name).read_text())) <= targets
    assert targets >= {"demo", "test", "check", "fix", "bench", "test-all"}
