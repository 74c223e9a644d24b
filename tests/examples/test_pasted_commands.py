"""The pages' commands, pasted one after the other in a copy of the tree that is as a clone is."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_pages import PAGES, ROOT, blocks

# What only makes the environment, which the test has, and what takes hours.
NOT_RUN = {"make install", ". .venv/bin/activate", "pip install .", "make bench"}
# What commands end sooner with, or need where no GPU is, by page and by how a command begins. Where an option is given
# twice, the last one counts.
FEW = "--num-prompts 2 --max-new-tokens 8"
DEMO = 'DEMO_ARGS="--prompts 2 --max-new-tokens 8 --passes 1"'
ADDED = {
    "README.md": {"make demo": DEMO, "hf-speculate bench": FEW, "hf-speculate batch": "--max-new-tokens 4"},
    "docs/install.md": {"make demo": DEMO},
    "docs/batch.md": dict.fromkeys(("hf-speculate batch", "torchrun"), "--max-new-tokens 4")
    | {"accelerate launch --multi_gpu": "--max-new-tokens 4 --device cpu"},
    "docs/benchmarks.md": {"python benchmarks/suffix.py": "--lengths 512 1024 --batch-sizes 1 --rounds 50"},
    "docs/cli.md": {"hf-speculate bench": FEW, "hf-speculate tune": FEW, "hf-speculate batch": "--max-new-tokens 4"},
    "docs/measuring.md": {"hf-speculate bench": FEW, "hf-speculate tune": FEW},
    "docs/tutorial.md": {"hf-speculate generate my-model": "--max-new-tokens 4"},
    "examples/heads/README.md": {
        "python -m heads.train": "--batches 1 --minutes 0.02",
        "python -m heads.measure": "--prompts 2 --max-new-tokens 8 --passes 1",
    },
}
MAY_SAY_NO = "hf-speculate tune "  # with status 1, where plain decoding is as fast
STAMPS = (".installed", ".installed-dev")  # of the Makefile
LIMIT_S = 600  # of a command, on a busy machine


def commands(page: str) -> list[str]:
    """The commands of a page's blocks of sh, in order, each with the lines that it goes on in."""
    return [command for block in blocks(page, "sh") for command in re.split(r"(?<!\\)\n", block.strip())]


WITH_COMMANDS = [page for page in PAGES if commands(page)]


def git(tree: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=tree, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The tracked files as they are now, in a repository of their own, beside an environment that is installed."""
    tree = tmp_path / "clone"
    for name in git(ROOT, "ls-files", "-z").split("\0")[:-1]:
        if os.path.lexists(ROOT / name):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    (tree / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name not in STAMPS:
            (tree / ".venv" / path.name).symlink_to(path)
    for stamp in STAMPS:  # newer than what `make` compares them with
        (tree / ".venv" / stamp).touch()
    return tree


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_runs_as_it_stands_in_the_pages_order(page: str, clone: Path) -> None:
    path = os.pathsep.join([str(clone / ".venv" / "bin"), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(clone), "HF_HUB_OFFLINE": "1"}
    # The examples' model can neither be found nor fetched, so they decode with the bundled pair.
    environment |= {"PIP_NO_INDEX": "1", "HF_SPECULATE_CACHE": str(clone.parent / "cache")}
    shutil.copytree(clone / "examples" / "pair" / "target", clone / "my-model")  # which a block of Python makes
    printed, folder = {}, clone
    for command in commands(page):
        if command.startswith("cd "):
            folder = folder / command.removeprefix("cd ")
        if command in NOT_RUN or command.startswith("cd "):
            continue
        added = [words for begin, words in ADDED.get(page, {}).items() if command.startswith(begin)]
        pasted = ["bash", "-c", " ".join([command, *added])]
        result = subprocess.run(pasted, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        allowed = (0, 1) if command.startswith(MAY_SAY_NO) else (0,)
        assert result.returncode in allowed, f"{command}\n{result.stdout}\n{result.stderr}"
        printed[command] = result.stdout
    assert printed
    if page == "README.md":
        assert "greedy texts are identical to plain generate()" in printed["make demo"]
    assert git(clone, "diff", "--name-only") == ""
    assert git(clone, "ls-files", "--others", "--exclude-standard") == "", "left in the clone, not in .gitignore"


def test_what_is_added_or_left_out_is_still_shown() -> None:
    shown = {page: "\n".join(["", *commands(page)]) for page in ADDED}
    assert [begin for page, added in ADDED.items() for begin in added if f"\n{begin}" not in shown[page]] == []
    assert {command for page in WITH_COMMANDS for command in commands(page)} >= NOT_RUN
