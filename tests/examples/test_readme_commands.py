"""README's commands, pasted one after the other in a copy of the tree that is as a clone is."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^( *)```sh\n(.*?)^\1```$", re.M | re.S)
# What only makes the environment, which the test has.
NOT_RUN = ("make install", ". .venv/bin/activate")
SHORTER = {"make demo": 'make demo DEMO_ARGS="--prompts 2 --max-new-tokens 8 --passes 1"'}
MAY_SAY_NO = "hf-speculate tune "  # with status 1, where plain decoding is as fast
LIMIT_S = 600  # of a command, on a busy machine


def commands() -> list[str]:
    """The commands of README's blocks of sh, in order, each with the lines that it goes on in."""
    blocks = [dedent(code) for _, code in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))]
    return [command for block in blocks for command in re.split(r"(?<!\\)\n", block.strip())]


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
        if path.name != ".installed":
            (tree / ".venv" / path.name).symlink_to(path)
    (tree / ".venv" / ".installed").touch()  # newer than what `make` compares it with
    return tree


@pytest.mark.slow
def test_every_command_runs_as_it_stands_in_readmes_order(clone: Path) -> None:
    shown = commands()
    assert {*NOT_RUN, *SHORTER} <= {*shown}
    assert {"batch", "bench", "check", "generate", "tune"} <= {line.split()[1] for line in shown}
    path = os.pathsep.join([str(clone / ".venv" / "bin"), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(clone), "HF_HUB_OFFLINE": "1"}
    printed = {}
    for command in shown:
        if command in NOT_RUN:
            continue
        pasted = ["bash", "-c", SHORTER.get(command, command)]
        result = subprocess.run(pasted, cwd=clone, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        allowed = (0, 1) if command.startswith(MAY_SAY_NO) else (0,)
        assert result.returncode in allowed, f"{command}\n{result.stderr}"
        assert result.stdout or command.startswith("hf-speculate batch"), command
        printed[command] = result.stdout
    assert "greedy texts are identical to plain generate()" in printed["make demo"]
    assert "typical" in (clone / "report.html").read_text(encoding="utf-8")
    num_prompts = len((clone / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines())
    assert len((clone / "texts.jsonl").read_text(encoding="utf-8").splitlines()) == num_prompts
    assert git(clone, "diff", "--name-only") == ""
    assert git(clone, "ls-files", "--others", "--exclude-standard") == "", "left in the clone, not in .gitignore"
