"""What the pages show runs, and what they list is whole."""

import ast
import itertools
import json
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import hf_speculate
from hf_speculate import triton_kernels
from hf_speculate.config import FIELD_NAMES
from tests.page_code import PAIR, run_blocks
from tests.pages import BLOCK, PAGES, PROGRAM, ROOT, blocks, named_commands, read
from tests.shown_commands import problems_in

LANGUAGES = ("python", "sh", "json", "text", "{image}", "{toctree}")  # the last two are Sphinx's to check


def headings(path: Path) -> set[str]:
    """The names by which links lead to a page's headings, as code hosts and myst make them."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    titles = [title.strip().lower() for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.fixture
def away(tmp_path: Path, registry: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which paths below `examples/` lead where they do in a clone, and nothing is written there."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    return tmp_path


@pytest.mark.fallback("eager forwards")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_every_python_block_runs_in_order(page: str, away: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(run_blocks(page)) == []
    for num_equal, num, dtype in re.findall(r"(\d+) of (\d+) rows? equal plain .* in (\w+)", capsys.readouterr().out):
        assert (num_equal, dtype) == (num, "float32")  # what a reader checks first is equal


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_looked_at_and_every_command_would_be_accepted(page: str) -> None:
    text = read(page)
    assert {label.split(" ")[0] for _, label, _ in BLOCK.findall(text)} <= set(LANGUAGES)
    for code in blocks(page, "json"):
        json.loads(code)
    assert [problem for code in blocks(page, "sh") for problem in problems_in(code)] == []
    assert [problem for code in named_commands(page) for problem in problems_in(code, is_whole=False)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.stem)
def test_every_example_says_a_command_that_would_be_accepted(path: Path) -> None:
    shown = re.findall(r"^ {4}(.*(?:\\\n.*)*)$", ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "", re.M)
    assert [problem for code in shown if PROGRAM.match(code) for problem in problems_in(code)] == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make tests", "has no tests"),
        ("hf-speculate chek TARGET", "no command chek"),
        ("hf-speculate check --draft DRAFT", "Missing argument"),
        ("python examples/dem.py", "no file dem.py"),
        ("HF_HUB_OFFLINE=1 python examples/demo.py --promts 3", "takes no --promts"),
        ("accelerate launch --num_processes 2 -m hf_speculate.tools.cli.main generat TARGET", "no command generat"),
        ("hf_speculate check TARGET", "not looked at"),
        ('hf-speculate --debug generate TARGET "def main():" \\\n  --draft DRAFT > out.txt', ""),
        ("python -m hf_speculate.tools.cli.main check TARGET --draft DRAFT | python -m json.tool", ""),
    ],
)
def test_a_wrong_command_is_found_and_a_right_one_accepted(command: str, problem: str) -> None:
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


def test_lists_of_the_pages_are_whole() -> None:
    guide, settings, benchmarks = map(read, ("CONTRIBUTING.md", "docs/settings.md", "docs/benchmarks.md"))
    library = ROOT / "hf_speculate"
    names = [path.name for path in library.glob("*.py") if path.name != "__init__.py"]
    names += [f"{path.parent.name}/" for path in library.glob("*/__init__.py")]
    assert [name for name in sorted(names) if not re.search(rf"`(hf_speculate/)?{re.escape(name)}", guide)] == []
    assert [name for name in FIELD_NAMES if f"`{name}`" not in settings] == []
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_")}
    assert set(re.findall(r"^\| `(\w+\.py)` \|", benchmarks, re.M)) == scripts
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.rst"))
    shown = set(re.findall(r"^\.\. auto(?:function|class|exception):: (?:[a-z_]+\.)*(\w+)", text, re.M))
    assert sorted({*hf_speculate.__all__, *triton_kernels.__all__} - shown) == []


def test_the_reference_of_the_command_line_shows_text_without_markup() -> None:
    text = runpy.run_path(str(ROOT / "docs" / "cli_reference.py"))["reference"]()
    assert "| Largest number of new tokens. | `256; bench and tune: 128` |" in text
    assert re.findall(r"\[/?[a-z]+\]|\\\[", text) == []


RESULTS = ROOT / "benchmarks" / "results" / "end_to_end.json"


def test_the_pictures_of_speed_show_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = runpy.run_path(str(ROOT / "benchmarks" / "speed_plot.py"))
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for (prefix, layout), (name, theme) in itertools.product(script["LAYOUTS"].items(), script["THEMES"].items()):
        shown = (ROOT / "docs" / "pictures" / f"speed-{prefix}{name}.svg").read_text(encoding="utf-8")
        assert shown == script["picture"](results, theme, layout), "out of date: run python benchmarks/speed_plot.py"


def test_tables_of_speed_are_those_of_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme_tables.py"))
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    parts = script["parts"](results, script["read_results"]("real_models"))
    for page, names in script["PAGES"].items():
        for name in names:
            shown = re.findall(rf"<!-- {name}: begin -->\n(.*?)\n<!-- {name}: end -->", read(page), re.S)
            assert shown == [parts[name]], f"{page} is out of date: run python benchmarks/readme_tables.py"
    assert {AutoConfig.from_pretrained(PAIR / name).dtype for name in ("target", "draft")} == {torch.float32}


def test_the_page_of_results_says_which_were_measured_with_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = runpy.run_path(str(ROOT / "benchmarks" / "results_page.py"))
    of_core = {"parts": ["core"], "sources": page["source_hash"](["core"])}
    hashes = {"a": of_core, "b": {"sources": "0" * 12}, "c": {}, "d": of_core | {"parts": ["core", "options/heads"]}}
    note = page["sources_note"]((name, {"environment": of}) for name, of in hashes.items())
    assert [line for line in note.splitlines() if line.startswith("- ")] == [
        "- Measured with the same sources: `a`.",
        "- Measured with other sources: `b`, `d`.",
        "- Measured with unrecorded sources: `c`.",
    ]


def test_the_hash_of_the_sources_follows_the_names_and_code_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    source_hash = runpy.run_path(str(ROOT / "benchmarks" / "_harness.py"))["source_hash"]

    def hash_of(name: str, code: str) -> str:
        shutil.rmtree(tmp_path / "hf_speculate", ignore_errors=True)
        (tmp_path / "hf_speculate" / "options" / "b").mkdir(parents=True)
        (tmp_path / "hf_speculate" / "options" / "b" / f"{name}.py").write_text(code)
        (tmp_path / "hf_speculate" / "a.py").write_text("x = 1")
        return str(source_hash(["core", "options/b"], tmp_path))

    first = hash_of("c", "x = 1")
    core = source_hash(["core"], tmp_path)
    assert hash_of("c", '"""Words."""\n\nx = 1  # more words\n') == first
    assert len({first, hash_of("c", "x = 2"), hash_of("d", "x = 1"), core}) == 4
    assert source_hash(["core"], tmp_path) == core
