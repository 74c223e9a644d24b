"""Test the commands of the pages, pasted in order in an environment with every extra."""

import sys
from pathlib import Path

import pytest

from tests.pasted_commands import has_run, make_clone, paste
from tests.support.pages import PAGES, commands

# Commands that only create the environment, take hours, or need a GPU.
ON_A_GPU = "PYTHONPATH=. python3 benchmarks/gpu.py --out build/gpu"
NOT_RUN = ("make install", ". .venv/bin/activate", "pip install .", "make bench", ON_A_GPU)
WITH_COMMANDS = [
    page for page in PAGES if not all(command.startswith(NOT_RUN) for command in commands(page))
]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run_unchanged_in_the_order_of_the_page(page: str, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    make_clone(clone, Path(sys.prefix))
    printed = {}
    for command, result in paste(page, commands(page), clone, {"PYTHONPATH": str(clone)}, NOT_RUN):
        assert has_run(command, result), f"{command}\n{result.stdout}\n{result.stderr}"
        printed[command] = result.stdout
    assert printed
    if page == "README.md":
        assert "greedy texts are identical to plain generate()" in printed["make demo"]
