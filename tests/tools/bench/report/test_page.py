"""Test the report page: its content, escaped names, its plots, and that it loads no resources."""

import html
import re
import shutil
from html.parser import HTMLParser

import pytest

from hf_speculate.errors import ConfigError
from hf_speculate.tools.bench.report.page import write_html
from hf_speculate.tools.bench.report.plots import (
    Bar,
    axis_of_counts,
    axis_of_values,
    plot_bars,
    rounded_axis,
)
from hf_speculate.tools.bench.report.values import Spread
from tests.tools.bench.report.results import FALLBACK, make_result, method

pytest.importorskip("hypothesis", reason="needs hypothesis")
from hypothesis import given
from hypothesis import strategies as st

HOSTILE = (
    "</title><script>alert(1)</script><img src=x onerror='alert(2)'>\">"
    "<svg onload=alert(3)>{{ 7 * 7 }}&amp;"
)
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href"}


class Page(HTMLParser):
    """Parser for a page's elements, attributes and texts, as a browser would read them."""

    def __init__(self, folder, result):
        super().__init__()
        self.tags, self.attributes, self.text = [], set(), ""
        self.source = write_html(result, folder / "report.html").read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data

    def row(self, name):
        """Return the first line of a table that starts with this text."""
        lines = [
            re.findall(r"<td[^>]*>(.*?)</td>", line, re.S) for line in self.source.split("<tr")
        ]
        cells = [[html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in line] for line in lines]
        return next(line[1:] for line in cells if line[:1] == [name])


def test_tables_show_the_figures(tmp_path):
    page = Page(tmp_path, make_result())
    counts = ["126 (101 to 152)", "2.13 (1.70 to 2.56)", "2.87", "53.0 %", "12 of 12 rows equal"]
    assert page.row("hf_speculate, greedy, K = 5") == ["greedy", "exact", "5", *counts]
    assert page.row("plain, greedy") == ["-", "exact", "-", "59 (47 to 71)", "1.00", "-", "-", "-"]
    assert page.row("writing") == ["hf_speculate, greedy, adaptive", "0.80", "40.0 %"]
    assert page.row("typical") == ["0.01", "171", "2.89", "-1.602", "62.4 %"]


def test_headline_is_the_fastest_exact_method_with_its_doubts(tmp_path):
    result = make_result()
    page = Page(tmp_path, result)
    said = re.sub(r"\s+", " ", page.text)
    assert (
        "2.13\u00d7 The speed of the fastest lossless method, hf_speculate, greedy, K = 5, "
        "relative to" in said
    )
    assert f"hf_speculate, typical, K = 5: {FALLBACK}" in said
    assert "transformers, defaults: left out, RuntimeError: another vocabulary" in said
    assert "hf-speculate bench target prompts.jsonl" in page.source.partition("</header>")[0]
    assert 'class="warning"' not in page.source
    result["reliability"] = {"is_reliable": False, "reasons": ["2 prompts, 1 repeat: not reliable"]}
    result["methods"][3]["is_noise"] = True
    page = Page(tmp_path, result)
    assert '<p class="warning">2 prompts, 1 repeat: not reliable</p>' in page.source
    assert 'class="headline doubtful">1.93' in page.source
    assert page.row("hf_speculate, greedy, K = 5")[4] == "2.13 (1.70 to 2.56) (noise)"
    result |= {
        "methods": [result["methods"][0], method("slow", 0.7), method("lossy", 3, is_lossy=True)],
        "categories": [],
    }
    assert re.search(
        r"0\.70\u00d7\s+No lossless method was faster than plain", Page(tmp_path, result).text
    )


def test_missing_values_are_left_out_with_their_plots(tmp_path):
    with pytest.raises(ConfigError, match="'methods'"):
        write_html({"methods": []}, tmp_path / "report.html")
    fields = (
        "speedup",
        "mean_acceptance_length",
        "draft_lens",
        "seconds",
        "acceptance_rate_per_position",
    )
    entry = method("ours", 1.0) | dict.fromkeys(fields)
    result = {
        "methods": [entry],
        "categories": [{"category": "a", "method": "ours", "speedup": None}],
    }
    result["drift"] = [{"verifier": "typical", "posterior_threshold": 0.1, "speedup": None}]
    page = Page(tmp_path, result)
    titles = "Acceptance rate by position|Draft length over time|Time by stage"
    assert [
        len({*re.findall(titles, shown.text)}) for shown in (Page(tmp_path, make_result()), page)
    ] == [3, 0]
    assert not re.search(r"\b(nan|inf|none)\b", page.source.partition("</style>")[2].lower())
    assert page.row("hf_speculate, ours")[4:6] == ["-", "-"]
    assert page.row("a") == ["hf_speculate, ours", "-", "-", "-"]


def hostile(value, name=""):
    """Make a result whose texts all start with code for browsers."""
    if isinstance(value, dict):
        return {key: hostile(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [hostile(inner, name) for inner in value]
    return f"{HOSTILE}{value}" if isinstance(value, str) and name != "engine" else value


def test_page_loads_nothing_and_escapes_names(tmp_path):
    result = make_result()
    attack = hostile(result)
    attack["settings"] |= {HOSTILE: HOSTILE}
    result["settings"] |= {"name": "value"}
    attack["methods"][0]["name"] = result["methods"][0]["name"]  # the others are compared with it
    page, attacked = Page(tmp_path, result), Page(tmp_path, attack)
    assert (attacked.tags, attacked.attributes) == (page.tags, page.attributes)
    assert attacked.text.count(HOSTILE) > len(result["methods"])
    assert not LOADING & page.attributes
    assert not {"script", "link", "img", "iframe", "object", "embed", "use", "image", "base"} & set(
        page.tags
    )
    assert not re.findall(r"url\(|@import|https?:|//[a-z]", page.source)
    assert not [name for name in page.attributes if name.startswith("on")]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6))
def test_rounded_axis_holds_every_value_in_order(values: list[float]) -> None:
    axis = rounded_axis(values, 0.0, 100.0)
    xs, ticks = [axis.position(value) for value in sorted(values)], axis.ticks()
    assert [0.0, *xs, 100.0] == sorted([ticks[0][0], *xs, ticks[-1][0]])
    assert 2 <= len({label for _, label in ticks}) == len(ticks) <= 7


def test_axis_has_round_labels_and_is_logarithmic_if_wide() -> None:
    assert [label for _, label in rounded_axis([3.0], 0.0, 100.0).ticks()] == [
        "2.6",
        "2.8",
        "3.0",
        "3.2",
        "3.4",
    ]
    assert [label for _, label in axis_of_counts(700, 0.0, 100.0).ticks()] == [
        "1",
        "200",
        "400",
        "600",
    ]
    for values in ([0.5, 0.005, 0.05, 0.051], [0.0, 0.05, 0.051, 0.1]):
        ticks = axis_of_values(values, 0.0, 100.0).ticks()
        assert (ticks[1], len(ticks)) == ((50.0, "0.05"), 3)


def test_bars_begin_at_zero_and_leave_room_for_plain() -> None:
    plot = plot_bars(
        [Bar("a", Spread(1.0, 2.0, 4.0), False), Bar("b", Spread(0.5, 0.5, 0.5), True)]
    )
    assert [plot.x.position(value) for value in (0.0, 0.5, 1.0, 2.0, 4.0)] == [
        0.0,
        12.5,
        25.0,
        50.0,
        100.0,
    ]
    assert [label for _, label in plot.x.ticks(plot.unit)] == [
        f"{number}\u00d7" for number in range(5)
    ]


PHONE, DESKTOP = 360, 1280
MIN_LETTER_PX = 12
# Per method three bars and one stack, one line per category, positions, rounds, and drift.
NUM_PLOTS = 3 * 5 + 1 + 1 + 4 + 4 + 3
# Collects visible faults in one call.
LOOK = """() => {
  const box = one => one.getBoundingClientRect();
  const inside = (one, frame) =>
    Math.min(one.left - frame.left, frame.right - one.right,
      one.top - frame.top, frame.bottom - one.bottom) >= -1;
  const problems = [];
  for (const frame of document.querySelectorAll('.scroll'))
    if (window.innerWidth > PHONE && frame.scrollWidth > frame.clientWidth)
      problems.push('clipped: ' + frame.getAttribute('aria-label'));
  if (document.documentElement.scrollWidth > window.innerWidth) problems.push('too wide');
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement, scale = parent.getScreenCTM ? parent.getScreenCTM().a : 1;
    if (!node.data.trim() || parent.localName === 'title' || !box(parent).width) continue;
    if (parseFloat(getComputedStyle(parent).fontSize) * scale < MIN_LETTER_PX)
      problems.push('small: ' + node.data);
  }
  for (const svg of document.querySelectorAll('svg')) {
    const marks = [...svg.querySelectorAll('.mark')], labels = [...svg.querySelectorAll('text')];
    const name = svg.getAttribute('aria-label');
    if (svg.matches('.plot') && (!marks.length || box(svg).width < 100))
      problems.push('not drawn: ' + name);
    for (const mark of marks) {
      if (box(mark).width + box(mark).height === 0) problems.push('a mark without size: ' + name);
      if (!inside(box(mark), box(svg))) problems.push('a mark outside: ' + name);
    }
    labels.forEach((one, place) => {
      if (!inside(box(one), box(svg))) problems.push('cut: ' + one.textContent);
      for (const other of labels.slice(place + 1)) {
        const [a, b] = [box(one), box(other)];
        if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
          problems.push(one.textContent + ' over ' + other.textContent);
      }
    });
  }
  return problems;
}""".replace("MIN_LETTER_PX", str(MIN_LETTER_PX)).replace("PHONE", str(PHONE))


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


def look_at(browser, path, width, scheme="light"):
    """Return the faults of a page and its number of plots."""
    page, problems = (
        browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme),
        [],
    )
    page.on(
        "request",
        lambda request: (
            request.url != path.as_uri() and problems.append(f"asked for: {request.url}")
        ),
    )
    page.on("console", lambda message: problems.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.goto(path.as_uri(), wait_until="load")
    problems += page.evaluate(LOOK)
    num_plots = len(page.query_selector_all("svg.plot"))
    page.close()
    return problems, num_plots


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), [("light", PHONE), ("dark", DESKTOP)])
def test_page_is_drawn_in_a_browser(browser, tmp_path, width, scheme):
    result = make_result()
    result["methods"][3]["is_noise"] = True  # the longest text of a speedup
    assert look_at(browser, write_html(result, tmp_path / "report.html"), width, scheme) == (
        [],
        NUM_PLOTS,
    )
