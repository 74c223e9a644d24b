"""The pages' commands run, pasted one after the other in an environment that has every extra."""

import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, commands
from tests.pasted_commands import ADDED, has_run, make_clone, paste
from tests.plain_environment import LEFT_OUT, PLAIN_PAGES, shown_commands

# What only makes the environment, which the test has, what takes hours, and what needs a GPU.
FIRST_LIGHT = "PYTHONPATH=. python3 benchmarks/on_gpu.py --first-light --out build/first-light"
NOT_RUN = ("make install", ". .venv/bin/activate", "pip install .", "make bench", FIRST_LIGHT)
WITH_COMMANDS = [page for page in PAGES if not all(command.startswith(NOT_RUN) for command in commands(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_runs_as_it_stands_in_the_pages_order(page: str, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    make_clone(clone, Path(sys.prefix))
    printed = {}
    for command, result in paste(page, commands(page), clone, {"PYTHONPATH": str(clone)}, NOT_RUN):
        assert has_run(command, result), f"{command}\n{result.stdout}\n{result.stderr}"
        printed[command] = result.stdout
    assert printed
    if page == "README.md":
        assert "greedy texts are identical to plain generate()" in printed["make demo"]


def test_what_is_added_or_left_out_is_still_shown() -> None:
    shown = {page: "\n".join(["", *commands(page)]) for page in ADDED}
    assert [begin for page, added in ADDED.items() for begin in added if f"\n{begin}" not in shown[page]] == []
    assert {command for page in PAGES for command in commands(page)} >= set(NOT_RUN)
    plain = "\n".join(["", *(command for page in PLAIN_PAGES for command in shown_commands(page))])
    assert [begin for begin in LEFT_OUT if f"\n{begin}" not in plain] == []


def test_ci_runs_the_readmes_commands_in_its_order_and_then_every_set_of_tests() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    expected = ("make demo", "make test ", "make test-kernels test-tools test-slow ", "make test-plain")
    starts = [script.find(f" {command}") for command in expected]
    assert -1 not in starts
    assert starts == sorted(starts)
