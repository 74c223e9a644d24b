"""Run the pages in an environment of `pip install .`; commands of extras must name their extra."""

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.pasted_commands import Result, has_run, make_clone, paste
from tests.support.pages import (
    DOCS,
    ROOT,
    blocks,
    commands,
    extras_named_in,
    extras_of_scripts,
    named_commands,
)
from tests.support.shown_commands import problems_in

PLAIN_PAGES = ("README.md", "examples/README.md", *(page for page in DOCS if page.count("/") == 1))
# Commands to skip, by how they start, with the reason.
LEFT_OUT = {
    "pip install ": "makes the environment in which this runs",
    "make demo": "makes an environment with an extra; .ci/run begins with it",
    "make install": "the first half of make demo",
    ". .venv/bin/activate": "the environment is the active one",
    "make test": "installs what contributors need; .ci/run runs it",
    "make check": "installs what contributors need; .ci/run runs it",
    "make docs": "installs what contributors need; .ci/run runs it",
    "make kernels": "installs what contributors need; .ci/run runs it",
    "make gpu-check": "installs what contributors need; .ci/run runs it with a tiny model",
    "make kernel-repo": "makes an environment with an extra; tests/tools/hub runs what it runs",
    "make results-check": "for contributors, before a release",
    "make bench": "hours",
    "python benchmarks/": "for contributors, up to hours",
    "python -m tests.": "for contributors, with pytest",
    "accelerate launch ": "accelerate, which the page says to install, is the program itself",
    "python examples/lm_eval_harness.py": "lm-eval, which its first line says to install",
    "python examples/trl_rollouts.py": "trl, which its first line says to install",
    "python examples/demo_": "modules of the demo, which are no scripts",
    "python examples/tensor_parallel.py": "for torchrun, by which docs/scaling.md runs it",
}
FEW = "--max-new-tokens 8 --num-assistant-tokens 3"
ADDED_TO_SCRIPTS = {"custom_drafter.py": "--max-new-tokens 8", "custom_verifier.py": FEW}
# Extras, keyed by words of a command, and by page for its Python code.
EXTRA_OF_WORDS = {"--engine ray": {"ray"}, "torchrun ": {"ranks"}}
EXTRAS_OF_CODE = {"docs/statistics.md": {"plot"}}
# Commands that only extras install; a plain environment has none of them.
EXTRA_MODULES = (
    "accelerate",
    "datasets",
    "fastapi",
    "gguf",
    "matplotlib",
    "pandas",
    "prometheus_client",
    "ray",
    "uvicorn",
    "xgrammar",
)


def shown_commands(page: str) -> list[str]:
    """Return the commands of a page: those in blocks, complete ones in its text, and scripts."""
    named = [command for command in named_commands(page) if not problems_in(command)]
    scripts = [
        name
        for name in extras_of_scripts()
        if name.endswith(".py") and page == "examples/README.md"
    ]
    run = [
        " ".join(["python", f"examples/{name}", *ADDED_TO_SCRIPTS.get(name, "").split()])
        for name in scripts
    ]
    return list(dict.fromkeys([*commands(page), *named, *run]))


def runs_something(page: str) -> bool:
    return not all(command.startswith(tuple(LEFT_OUT)) for command in shown_commands(page))


def extras_of(command: str) -> set[str]:
    """Return the extras that a command needs, from the table of examples and `EXTRA_OF_WORDS`."""
    needed = [extras for words, extras in EXTRA_OF_WORDS.items() if words in command]
    if "--tiny" not in command:
        needed += [
            extras
            for name, extras in extras_of_scripts().items()
            if f"python examples/{name}" in command
        ]
    return set().union(*needed)


def says_the_extra(command: str, result: Result, extras: set[str]) -> bool:
    """Return True if a command failed with one line naming an extra; torchrun adds more lines."""
    lines = result.stderr.strip().splitlines()
    if not command.startswith("torchrun "):
        lines = lines[-1:] if "Traceback" not in result.stderr else []
    return result.returncode != 0 and any(extras_named_in(line) & extras for line in lines)


@pytest.fixture
def environment(request: pytest.FixtureRequest) -> Path:
    """Return the folder of the environment."""
    return Path(request.config.getoption("--environment")).resolve()


run = partial(subprocess.run, capture_output=True, text=True, check=False)


def test_environment_has_no_extra_and_its_own_copy(environment: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys, hf_speculate\n"
        f"print([name for name in {EXTRA_MODULES!r} if importlib.util.find_spec(name)])\n"
        "print(hf_speculate.__file__.startswith(sys.prefix))"
    )
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = run([environment / "bin" / "python", "-c", code], cwd=tmp_path, env=alone)
    assert result.stdout.splitlines() == ["[]", "True"], result.stderr


@pytest.mark.parametrize("page", list(filter(runs_something, PLAIN_PAGES)))
def test_commands_run_or_name_their_extra(page: str, environment: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    make_clone(clone, environment)
    for command, result in paste(page, shown_commands(page), clone, {"PYTHONPATH": ""}, LEFT_OUT):
        extras = extras_of(command)
        is_right = says_the_extra(command, result, extras) if extras else has_run(command, result)
        assert is_right, f"{command}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("page", [page for page in PLAIN_PAGES if blocks(page, "python")])
def test_python_blocks_run_or_name_their_extra(
    page: str, environment: Path, tmp_path: Path
) -> None:
    for name in ("examples", "tests"):  # these import the installed library
        (tmp_path / name).symlink_to(ROOT / name)
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "examples"), "HF_HUB_OFFLINE": "1"}
    result = run(
        [environment / "bin" / "python", "-m", "tests.page_code", page], cwd=tmp_path, env=variables
    )
    assert result.returncode == 0, result.stderr
    assert extras_named_in(result.stdout) == EXTRAS_OF_CODE.get(page, set()), result.stdout
