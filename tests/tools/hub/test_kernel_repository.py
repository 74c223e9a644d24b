"""Test that the `kernels` library loads the output of `make kernel-repo`, without this library."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hf_speculate.kernels import verify_rejection
from hf_speculate.tools.hub import kernel_repository as tool
from tests.kernels.distributions import make_keys
from tests.kernels.on_triton import assert_same, moved
from tests.kernels.operations import make_round
from tests.tools.hub.test_repository import files_in

pytest.importorskip("triton", reason="needs Triton")

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "hf_speculate" / "tools" / "hub" / "kernel_repository.py"
PACKAGE = "hf_speculate_kernels"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a repository's `build` folder over an older variant and a setuptools build."""
    folder = tmp_path_factory.mktemp("repository") / "build"
    for name in ("torch-universal/old.py", "lib/kept.py"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    command = [sys.executable, SCRIPT, "--folder", folder]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == f"written: {folder / 'torch-universal'}\n", result.stderr
    return folder


def test_variant_holds_the_sources_only(build: Path) -> None:
    written = files_in(build / "torch-universal")
    sources = files_in(ROOT / "hf_speculate" / "kernels")
    metadata = json.loads(written.pop("metadata.json"))
    assert written == {f"{PACKAGE}/{name}": content for name, content in sources.items()}
    assert (build / "lib" / "kept.py").exists()
    # The library requires all of them.
    assert set(metadata) == {"id", "name", "version", "license", "python-depends", "backend"}
    # The library uses the id as the key for loaded modules.
    assert metadata["id"] == f"{PACKAGE}_{tool.digest(build / 'torch-universal')}"
    assert len({tool.digest(build / name) for name in ("torch-universal", "lib")}) == 2
    assert metadata["name"].replace("-", "_") == PACKAGE


def load_by_hand(build: Path) -> ModuleType:
    """Import a variant as the library does: one file, under the name in the metadata."""
    variant = build / "torch-universal"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / PACKAGE / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_with_the_library(build: Path) -> ModuleType:
    return importlib.import_module("kernels").get_local_kernel(build.parent)


@pytest.mark.parametrize(
    "load", [load_by_hand, pytest.param(load_with_the_library, marks=pytest.mark.hub_kernels)]
)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_loaded_kernels_decide_as_the_library(load, backend: str, build: Path, monkeypatch) -> None:
    target, ids, draft = make_round(3, 3, 40, seed=5)
    keys = make_keys(3, rounds=2, positions=7)
    expected = verify_rejection(target, ids, draft, keys=keys, backend="torch")
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("hf_speculate", "triton_kernels")
    ]:
        monkeypatch.delitem(sys.modules, name)
    # from here on, importing hf_speculate fails
    monkeypatch.setitem(sys.modules, "hf_speculate", None)
    monkeypatch.setitem(sys.modules, "triton_kernels", None)
    kernels = load(build)
    assert Path(kernels.__file__) == build / "torch-universal" / PACKAGE / "__init__.py"
    own_keys = kernels.NoiseKeys(*moved(tuple(keys)))
    returned = kernels.verify_rejection(
        *map(moved, (target, ids, draft)), keys=own_keys, backend=backend
    )
    assert type(returned).__module__.startswith(f"{PACKAGE}_")
    assert_same(moved(returned, "cpu"), expected)
    assert not [name for name in sys.modules if name.startswith("hf_speculate.")]
