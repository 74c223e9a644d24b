"""The page says what the result says, loads nothing, and reads no name as HTML."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hf_speculate.errors import ConfigError
from hf_speculate.stats import STAGES
from hf_speculate.tools.bench.report import write_html
from hf_speculate.tools.bench.report.page import method_styles
from hf_speculate.tools.bench.report.plots import Style
from tests.tools.bench.report.results import FALLBACK, make_result, method

HOSTILE = "</title><script>alert(1)</script><img src=x onerror='alert(2)'>\"><svg onload=alert(3)>{{ 7 * 7 }}&amp;"
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href"}


class Page(HTMLParser):
    """Elements, attributes and texts of a page, as a browser would read them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.lines: list[list[str]] = []  # of all tables
        self.open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)
        if tag == "tr":
            self.lines.append([])
        elif tag == "td":
            self.lines[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "td" in self.open:
            self.lines[-1][-1] += data

    def row(self, name: str) -> list[str]:
        """The first line of a table that begins so."""
        return next(line for line in self.lines if line[:1] == [name])


def written(result: dict[str, Any], folder: Path) -> tuple[str, Page]:
    path = write_html(result, folder / "report.html")
    assert path == folder / "report.html"
    source = path.read_text(encoding="utf-8")
    return source, Page(source)


def all_text(page: Page) -> str:
    return re.sub(r"\s+", " ", " ".join(page.texts))


def test_tables_show_the_figures(tmp_path: Path) -> None:
    _, page = written(make_result(), tmp_path)
    assert page.row("hf_speculate, greedy, K = 5") == [
        "hf_speculate, greedy, K = 5",
        "greedy",
        "exact",
        "5",
        "126 (101 to 152)",
        "2.13 (1.70 to 2.56)",
        "2.87",
        "53.0 %",
        "12 of 12 rows equal",
    ]
    assert page.row("plain, greedy")[1:] == ["-", "exact", "-", "59 (47 to 71)", "1.00", "-", "-", "-"]
    assert ["hf_speculate, greedy, K = 5", "7.93 (6.35 to 9.52)"] in page.lines
    assert page.row("writing") == ["writing", "hf_speculate, greedy, adaptive", "0.80", "40.0 %"]
    assert page.row("typical") == ["typical", "0.01", "171 (137 to 206)", "2.89 (2.31 to 3.47)", "-1.602", "62.4 %"]
    assert page.row("plain, sampling")[1] == "-"


def test_the_page_begins_with_models_device_date_and_command(tmp_path: Path) -> None:
    source, _ = written(make_result(), tmp_path)
    title = source.partition("<title>")[2].partition("</title>")[0]
    assert title == "examples/pair/target with examples/pair/draft, AMD EPYC, 2026-11-22 - hf-speculate bench"
    top = source.partition("<header>")[2].partition("</header>")[0]
    for value in ("examples/pair/target", "AMD EPYC", "2026-11-22", "hf-speculate bench target prompts.jsonl"):
        assert value in top
    assert "hf-speculate bench target" not in source.partition("</header>")[2]


def test_a_method_has_one_colour_and_one_marker_in_all_plots() -> None:
    result = make_result()
    styles = method_styles(result)
    assert styles["typical"] == styles["hf_speculate, typical, K = 5"]
    assert styles["plain, greedy"] == Style.of(0)
    assert styles["plain, sampling"] not in [style for name, style in styles.items() if name != "plain, sampling"]
    assert len({Style.of(index) for index in range(64)}) == 64


def test_doubts_and_noise_are_said_beside_the_headline(tmp_path: Path) -> None:
    result = make_result()
    assert 'class="warning"' not in written(result, tmp_path)[0]
    result["reliability"] = {"is_reliable": False, "reasons": ["2 prompts, 1 repeat: not reliable"]}
    result["methods"][3]["is_noise"] = True
    source, page = written(result, tmp_path)
    assert '<p class="warning">2 prompts, 1 repeat: not reliable</p>' in source
    assert 'class="headline doubtful">1.93' in source
    assert page.row("hf_speculate, greedy, K = 5")[5] == "2.13 (1.70 to 2.56) (noise)"


def test_the_headline_is_the_fastest_exact_method(tmp_path: Path) -> None:
    _, page = written(make_result(), tmp_path)
    said = all_text(page)
    assert "2.13\u00d7 The speed of the fastest lossless method, hf_speculate, greedy, K = 5 , relative to" in said
    assert "median of runs from 1.70 to 2.56." in said
    assert "Compared with plain decoding: 12 of 12 rows equal." in said


def test_the_headline_says_when_nothing_is_faster(tmp_path: Path) -> None:
    result = make_result()
    result["methods"] = [result["methods"][0], method("slow", 0.7), method("lossy", 3.0, is_lossy=True)]
    result["categories"] = []
    _, page = written(result, tmp_path)
    assert (
        "0.70\u00d7 No lossless method was faster than plain decoding; the fastest, hf_speculate, slow ,"
        in all_text(page)
    )


def test_what_ran_otherwise_is_said(tmp_path: Path) -> None:
    _, page = written(make_result(), tmp_path)
    said = all_text(page)
    assert "left_out" not in said
    assert f"Differences from what was requested: hf_speculate, typical, K = 5: {FALLBACK}" in said
    assert "transformers, defaults: left out, RuntimeError: another vocabulary" in said
    result = make_result()
    result["settings"]["left_out"] = {}
    for entry in result["methods"]:
        entry["fallbacks"] = []
    assert "Differences from what was requested" not in all_text(written(result, tmp_path)[1])


def titles(page: Page) -> list[str]:
    """Of the sections and plots, in order."""
    known = (
        "Speed", "Speed-up over plain decoding", "Time to first token", "Time per token",
        "Inside a round", "Acceptance rate by position", "Draft length over time", "Time by stage",
        "By category", "Drift of lossy verifiers", "Log-likelihood per token", "Agreement with greedy", "Settings",
    )  # fmt: skip
    return [text for text in page.texts if text in known]


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["acceptance_rate_per_position"], ["Acceptance rate by position"]),
        (["draft_lens"], ["Draft length over time"]),
        (["seconds"], ["Time by stage"]),
        (
            ["acceptance_rate_per_position", "draft_lens", "seconds"],
            ["Inside a round", "Acceptance rate by position", "Draft length over time", "Time by stage"],
        ),
    ],
)
def test_plots_without_data_are_left_out(names: list[str], missing: list[str], tmp_path: Path) -> None:
    result = make_result()
    _, whole = written(result, tmp_path)
    for entry in result["methods"]:
        for name in names:
            entry.pop(name, None)
    _, page = written(result, tmp_path)
    assert titles(page) == [title for title in titles(whole) if title not in missing]


def test_values_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    entry = method("ours", 1.0) | {"speedup": None, "mean_acceptance_length": None, "draft_lens": None}
    result = {"methods": [entry], "categories": [{"category": "a", "method": "ours", "speedup": None}]}
    result["drift"] = [{"verifier": "typical", "posterior_threshold": 0.1, "speedup": None}]
    source, page = written(result, tmp_path)
    assert not re.search(r"\b(nan|inf|none)\b", source.partition("</style>")[2].lower())
    assert page.row("hf_speculate, ours")[5:7] == ["-", "-"]
    assert page.row("a") == ["a", "hf_speculate, ours", "-", "-", "-"]


@pytest.mark.parametrize("result", [{}, {"methods": []}])
def test_a_result_without_methods_is_refused(result: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'methods'"):
        write_html(result, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    source, page = written(make_result(), tmp_path)
    assert not LOADING & page.attributes
    assert not {"script", "link", "img", "iframe", "object", "embed", "use", "image", "base"} & set(page.tags)
    assert not re.findall(r"url\(|@import|https?:|//[a-z]", source)
    assert not [name for name in page.attributes if name.startswith("on")]


def with_hostile_names(value: Any, name: str = "") -> Any:
    """Every text in a result replaced, and keys of what is shown by name."""
    if isinstance(value, dict):
        return {key: with_hostile_names(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_hostile_names(inner, name) for inner in value]
    return f"{HOSTILE}{value}" if isinstance(value, str) and name != "engine" else value


def nested(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from nested(inner)
    elif isinstance(value, str):
        yield value


def test_no_name_is_read_as_html(tmp_path: Path) -> None:
    result = make_result()
    hostile = with_hostile_names(result)
    hostile["settings"] |= {HOSTILE: HOSTILE}
    result["settings"] |= {"name": "value"}
    hostile["methods"][0]["name"] = result["methods"][0]["name"]  # what the others are compared with
    _, page = written(result, tmp_path)
    source, attacked = written(hostile, tmp_path)
    assert attacked.tags == page.tags
    assert attacked.attributes == page.attributes
    assert "<script" not in source
    said = "".join(attacked.texts)
    assert [text for text in nested(hostile) if text not in said and text != "ours"] == []


def test_a_stack_is_filled_by_its_parts(tmp_path: Path) -> None:
    taken = dict(zip(STAGES, (0.0, 1.0, 2.0, 1.0, 0.0), strict=True))
    source, _ = written({"methods": [method("a", 1.0, seconds=taken)]}, tmp_path)
    parts = re.findall(r'class="mark part s(\d)" x="([\d.]+)%" y="2" width="([\d.]+)%"', source)
    assert parts == [("1", "0.0", "25.0"), ("2", "25.0", "50.0"), ("3", "75.0", "25.0")]
    assert f"<title>{STAGES[2]}: 2.00 s, 50.0 %</title>" in source
