"""What the pages show runs, and what they list is whole."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.main import get_command

import hf_speculate
from hf_speculate.cli import app
from hf_speculate.config import FIELD_NAMES
from hf_speculate.verify import base

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "examples" / "pair"
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)

# First line of a Python block that cannot run here -> why: it uploads, say, or stands for a model of the reader's.
NOT_RUN: dict[str, str] = {}


def blocks(page: str, language: str) -> list[str]:
    """The page's blocks of one language, in order."""
    return [code for kind, code in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if kind == language]


def names_of_the_example() -> dict[str, Any]:
    """What README's example has made, for pages that go on from it."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    model = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(PAIR / "target"))
    draft = AutoModelForCausalLM.from_pretrained(PAIR / "draft")
    prompts = ["def main():\n", "class Stack:\n"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    return {
        "hf_speculate": hf_speculate,
        "tokenizer": tokenizer,
        "model": model,
        "draft": draft,
        "prompts": prompts,
        "inputs": inputs,
    }


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which paths below `examples/` lead where they do in a clone, and nothing is written there."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_every_python_block_runs_in_order(page: str, away: Path) -> None:
    names = {} if page == "README.md" else names_of_the_example()
    for number, code in enumerate(blocks(page, "python")):
        if code.splitlines()[0] not in NOT_RUN:
            torch.manual_seed(0)
            exec(compile(code, f"{page}, block {number}", "exec"), names)


def test_what_is_not_run_is_still_shown() -> None:
    shown = {code.splitlines()[0] for page in PAGES for code in blocks(page, "python")}
    assert set(NOT_RUN) <= shown


def test_every_command_parses() -> None:
    lines = [line for page in PAGES for code in blocks(page, "sh") for line in code.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("hf-speculate ")]
    assert commands
    group: Any = get_command(app)
    for name, *words in commands:
        group.commands[name].make_context(name, list(words))


def test_links_lead_to_files() -> None:
    for page in PAGES:
        folder = (ROOT / page).parent
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
        assert [link for link in links if not (folder / link).exists()] == [], page


def test_the_guide_names_every_room() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    library = ROOT / "hf_speculate"
    rooms = [path.name for path in library.glob("*.py") if path.name != "__init__.py"]
    rooms += [f"{path.parent.name}/" for path in library.glob("*/__init__.py")]
    assert [room for room in sorted(rooms) if not re.search(rf"`(hf_speculate/)?{re.escape(room)}", guide)] == []


def test_the_table_of_settings_names_every_field() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Settings")[2].partition("\n## ")[0]
    assert [name for name in FIELD_NAMES if f"`{name}`" not in table] == []
