"""Test the code, commands and lists of the documentation pages."""

import ast
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_speculate
from hf_speculate import kernels
from hf_speculate.config import FIELD_NAMES
from tests.page_code import run_blocks
from tests.support.pages import BLOCK, PAGES, PROGRAM, ROOT, blocks, named_commands, read
from tests.support.shown_commands import problems_in

LANGUAGES = ("python", "sh", "json", "text", "{image}", "{toctree}")  # Sphinx checks the last two


def headings(path: Path) -> set[str]:
    """Return the link targets of a page's headings, in the form that code hosts and myst use."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    titles = [title.strip().lower() for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.fixture
def away(tmp_path: Path, registry: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a folder with the clone's `examples/` paths, so that the clone stays unchanged."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    return tmp_path


@pytest.mark.fallback("eager forwards")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_blocks_run_in_order(
    page: str, away: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(run_blocks(page)) == []
    for num_equal, num, dtype in re.findall(
        r"(\d+) of (\d+) rows? equal plain .* in (\w+)", capsys.readouterr().out
    ):
        assert (num_equal, dtype) == (num, "float32")  # readers check this first


@pytest.mark.parametrize("page", PAGES)
def test_shown_commands_are_accepted(page: str) -> None:
    text = read(page)
    assert {label.split(" ")[0] for _, label, _ in BLOCK.findall(text)} <= set(LANGUAGES)
    for code in blocks(page, "json"):
        json.loads(code)
    assert [problem for code in blocks(page, "sh") for problem in problems_in(code)] == []
    assert [
        problem for code in named_commands(page) for problem in problems_in(code, is_whole=False)
    ] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.stem
)
def test_example_commands_are_accepted(path: Path) -> None:
    shown = re.findall(
        r"^ {4}(.*(?:\\\n.*)*)$", ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "", re.M
    )
    assert [problem for code in shown if PROGRAM.match(code) for problem in problems_in(code)] == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make tests", "has no tests"),
        ("hf-speculate chek TARGET", "no command chek"),
        ("hf-speculate check --draft DRAFT", "Missing argument"),
        ("python examples/dem.py", "no file dem.py"),
        ("HF_HUB_OFFLINE=1 python examples/demo.py --promts 3", "takes no --promts"),
        (
            "accelerate launch --num_processes 2 -m hf_speculate.tools.cli.main generat TARGET",
            "no command generat",
        ),
        ("hf_speculate check TARGET", "not looked at"),
        ('hf-speculate --debug generate TARGET "def main():" \\\n  --draft DRAFT > out.txt', ""),
        (
            (
                "python -m hf_speculate.tools.cli.main check TARGET --draft DRAFT | python -m "
                "json.tool"
            ),
            "",
        ),
    ],
)
def test_command_parser_tells_wrong_from_right(command: str, problem: str) -> None:
    problems = problems_in(command)
    assert len(problems) == bool(problem)
    assert problem in "".join(problems)


def test_links_lead_to_files_and_headings() -> None:
    for page in PAGES:
        text = read(page)
        for path, heading in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", BLOCK.sub("", text)):
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), f"{page} leads to {path}"
            assert not heading or heading in headings(target), f"{page} leads to {path}#{heading}"


def test_lists_of_settings_benchmarks_and_names_are_complete() -> None:
    settings, benchmarks = map(read, ("docs/settings.md", "docs/measuring.md"))
    assert [name for name in FIELD_NAMES if f"`{name}`" not in settings] == []
    scripts = {
        path.name for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_")
    }
    assert set(re.findall(r"^\| `(\w+\.py)` \|", benchmarks, re.M)) == scripts
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.rst")
    )
    shown = set(
        re.findall(r"^\.\. auto(?:function|class|exception):: (?:[a-z_]+\.)*(\w+)", text, re.M)
    )
    assert sorted({*hf_speculate.__all__, *kernels.__all__} - shown) == []


def test_command_line_reference_shows_text_without_markup() -> None:
    text = runpy.run_path(str(ROOT / "docs" / "cli_reference.py"))["reference"]()
    assert "| Largest number of new tokens. | `256; bench and tune: 128` |" in text
    assert re.findall(r"\[/?[a-z]+\]|\\\[", text) == []
