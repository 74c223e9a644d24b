"""Run the commands of a page in order, in a copy of the tree that looks like a fresh clone."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.pages import ROOT

# Options that shorten commands or let them run without a GPU, keyed by page and by the start of a
# command. If an option is given twice, the last value counts.
FEW = "--num-prompts 2 --max-new-tokens 8"
DEMO = 'DEMO_ARGS="--prompts 2 --max-new-tokens 8 --passes 1"'
ADDED = {
    "README.md": {
        "make demo": DEMO,
        "hf-speculate bench": FEW,
        "hf-speculate batch": "--max-new-tokens 4",
    },
    "docs/install.md": {"make demo": DEMO},
    "docs/batch.md": dict.fromkeys(("hf-speculate batch", "torchrun"), "--max-new-tokens 4")
    | {"accelerate launch --multi_gpu": "--max-new-tokens 4 --device cpu"},
    "docs/cli.md": {
        "hf-speculate bench": FEW,
        "hf-speculate tune": FEW,
        "hf-speculate batch": "--max-new-tokens 4",
    },
    "docs/measuring.md": {
        "hf-speculate bench": FEW,
        "hf-speculate tune": FEW,
        "python benchmarks/suffix.py": "--lengths 512 1024 --batch-sizes 1 --rounds 50",
    },
    "docs/quickstart.md": {"hf-speculate generate my-model": "--max-new-tokens 4"},
    "examples/training/README.md": {
        "python -m training.train_eagle3": "--batches 1 --minutes 0.02",
        "python -m training.measure_eagle3": "--prompts 2 --max-new-tokens 8 --passes 1",
    },
}
MAY_SAY_NO = "hf-speculate tune "  # exits with status 1 if plain decoding is as fast
STAMPS = (".installed", ".installed-dev")  # stamp files of the Makefile
LIMIT_S = 600  # per command, on a busy machine

Result = subprocess.CompletedProcess[str]


def git(tree: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=tree, capture_output=True, text=True, check=True
    ).stdout


def make_clone(tree: Path, environment: Path) -> None:
    """Copy the tracked files to `tree` and make it a repository with an installed environment."""
    for name in git(ROOT, "ls-files", "-z").split("\0")[:-1]:
        if os.path.lexists(ROOT / name):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    (tree / ".venv").mkdir()
    for path in environment.iterdir():
        if path.name not in STAMPS:
            (tree / ".venv" / path.name).symlink_to(path)
    for stamp in STAMPS:  # newer than their prerequisites, so `make` does not rebuild them
        (tree / ".venv" / stamp).touch()
    # created by a block of Python on the page
    shutil.copytree(tree / "examples" / "pair" / "target", tree / "my-model")


def paste(
    page: str,
    commands: Iterable[str],
    clone: Path,
    variables: dict[str, str],
    left_out: Iterable[str] = (),
) -> Iterator[tuple[str, Result]]:
    """Run the commands of a page in order, and yield each command with its result.

    Commands that start with an entry of `left_out` are skipped.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    environment["PATH"] = os.pathsep.join([str(clone / ".venv" / "bin"), os.environ["PATH"]])
    # The examples' model is neither cached nor downloadable, so they use the bundled pair.
    environment |= {"PIP_NO_INDEX": "1", "HF_SPECULATE_CACHE": str(clone.parent / "cache")}
    folder, left_out = clone, tuple(left_out)
    for command in commands:
        if command.startswith("cd "):
            folder = folder / command.removeprefix("cd ")
        elif not command.startswith(left_out):
            added = [
                words for begin, words in ADDED.get(page, {}).items() if command.startswith(begin)
            ]
            pasted = ["bash", "-c", " ".join([command, *added])]
            options = {
                "stdin": subprocess.DEVNULL,
                "capture_output": True,
                "text": True,
                "timeout": LIMIT_S,
            }
            yield (
                command,
                subprocess.run(pasted, cwd=folder, env=environment, check=False, **options),
            )
    assert git(clone, "diff", "--name-only") == ""
    assert git(clone, "ls-files", "--others", "--exclude-standard") == "", (
        "left in the clone, not in .gitignore"
    )


def has_run(command: str, result: Result) -> bool:
    return result.returncode in ((0, 1) if command.startswith(MAY_SAY_NO) else (0,))
