"""A browser draws every plot of the page, asks for nothing else, and can be read on a phone."""

import io
import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from hf_speculate.stats import STAGES
from hf_speculate.tools.bench.report import write_html
from tests.tools.bench.report.results import make_result, method

pytestmark = pytest.mark.browser

PHONE, DESKTOP = 360, 1280
MIN_LETTER_PX = 12
MIN_CONTRAST = 4.5  # of text, by WCAG 2 level AA
MIN_MARK_CONTRAST = 3.0  # of what is drawn, likewise
MIN_DIFFERENCE = 30.0  # of two colours, in sRGB
NUM_PLOTS = (
    3 * 5 + 1 + 1 + 4 + 4 + 3
)  # three bars a method, positions, rounds, a stack a method, a line a category, drift

# Everything that can be measured on a page, in one call.
LOOK = """() => {
  const box = one => one.getBoundingClientRect();
  const inside = (one, frame) =>
    one.left >= frame.left - 1 && one.right <= frame.right + 1 &&
    one.top >= frame.top - 1 && one.bottom <= frame.bottom + 1;
  const channels = color => color.match(/[\\d.]+/g).map(Number);
  const luminance = color => {
    const [r, g, b] = channels(color).slice(0, 3).map(value => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = one => {
    for (let node = one; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (channels(color)[3] !== 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const contrast = (color, one) => {
    const [low, high] = [luminance(color), luminance(ground(one))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.localName === 'title' || !box(parent).width) continue;
    const style = getComputedStyle(parent);
    const matrix = parent.getScreenCTM ? parent.getScreenCTM().a : 1;
    const color = parent.closest('svg') ? style.fill : style.color;
    texts.push({text: node.data.trim(), px: parseFloat(style.fontSize) * matrix, contrast: contrast(color, parent)});
  }
  const plots = [...document.querySelectorAll('svg.plot')].map(svg => {
    const marks = [...svg.querySelectorAll('.mark')];
    const strength = mark => {  // of the mark, its outline, or the darker line below it
      const style = getComputedStyle(mark), casing = svg.querySelector('.casing');
      const colors = mark.localName === 'line' ? [style.stroke] : [style.fill, style.stroke];
      if (mark.localName === 'line' && casing) colors.push(getComputedStyle(casing).stroke);
      return Math.max(...colors.filter(color => color !== 'none').map(color => contrast(color, svg)));
    };
    return {
      label: svg.getAttribute('aria-label'),
      width: box(svg).width, height: box(svg).height, numMarks: marks.length,
      undrawn: marks.filter(mark => box(mark).width + box(mark).height === 0).length,
      outside: marks.filter(mark => !inside(box(mark), box(svg))).length,
      faint: marks.filter(mark => strength(mark) < MIN_MARK_CONTRAST).length,
    };
  });
  const crowded = [];
  for (const svg of document.querySelectorAll('svg')) {
    const labels = [...svg.querySelectorAll('text')];
    labels.forEach((one, place) => {
      if (!inside(box(one), box(svg))) crowded.push('cut: ' + one.textContent);
      for (const other of labels.slice(place + 1)) {
        const [a, b] = [box(one), box(other)];
        if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
          crowded.push(one.textContent + ' over ' + other.textContent);
      }
    });
  }
  for (const list of document.querySelectorAll('.curves ul')) {
    const names = [...list.querySelectorAll('li')];
    names.slice(1).forEach((one, place) => {
      const [a, b] = [box(names[place]), box(one)];
      if (a.left < b.right && b.left < a.right && a.bottom > b.top + 6) crowded.push('names: ' + one.textContent);
    });
  }
  const scrolls = [...document.querySelectorAll('.scroll')].map(one => ({
    moves: getComputedStyle(one).overflowX === 'auto', wider: one.scrollWidth > one.clientWidth,
  }));
  return {
    pageWidth: document.documentElement.scrollWidth, ground: ground(document.body), texts, plots, crowded, scrolls,
  };
}""".replace("MIN_MARK_CONTRAST", str(MIN_MARK_CONTRAST))


class Seen(NamedTuple):
    """What a browser made of a page."""

    asked_for: list[str]
    complaints: list[str]  # of the console, and errors of the page
    measured: dict[str, Any]

    def problems(self, width: int) -> list[str]:
        """Everything that a reader would notice."""
        texts, plots = self.measured["texts"], self.measured["plots"]
        found = [f"also asked for: {address}" for address in self.asked_for[1:]] + self.complaints
        if self.measured["pageWidth"] > width:
            found.append(f"the page is {self.measured['pageWidth']} px wide")
        found += [f"small: {one['text']}, {one['px']} px" for one in texts if one["px"] < MIN_LETTER_PX]
        found += [f"faint: {one['text']}, {one['contrast']:.2f}" for one in texts if one["contrast"] < MIN_CONTRAST]
        for plot in plots:
            if plot["width"] < 100 or plot["height"] < 10 or not plot["numMarks"]:
                found.append(f"not drawn: {plot}")
            found += [f"{name}: {plot}" for name in ("undrawn", "outside", "faint") if plot[name]]
        return found + self.measured["crowded"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


def look_at(browser: Any, path: Path, width: int, scheme: str = "light") -> Seen:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    asked_for: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked_for.append(request.url))
    page.on("console", lambda message: complaints.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.goto(path.as_uri(), wait_until="load")
    measured = page.evaluate(LOOK)
    page.close()
    return Seen(asked_for, complaints, measured)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_html(make_result(), tmp_path_factory.mktemp("report") / "report.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_page_is_drawn_and_read(browser: Any, report: Path, width: int, scheme: str) -> None:
    seen = look_at(browser, report, width, scheme)
    assert seen.asked_for == [report.as_uri()]
    assert seen.problems(width) == []
    assert len(seen.measured["plots"]) == NUM_PLOTS
    assert (seen.measured["ground"] == "rgb(255, 255, 255)") is (scheme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_two_methods_and_stages_differ_for_the_colour_blind(browser: Any, tmp_path: Path, scheme: str) -> None:
    result = make_result()
    result["methods"] += [method(f"greedy, K = {num}", 2.0) for num in (6, 7, 8)]  # a method for each colour
    page = browser.new_page(viewport={"width": PHONE, "height": 800}, color_scheme=scheme)
    page.goto(write_html(result, tmp_path / "report.html").as_uri())
    session, seen = page.context.new_cdp_session(page), {}
    for vision in ("none", "deuteranopia", "protanopia"):
        session.send("Emulation.setEmulatedVisionDeficiency", {"type": vision})
        image = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
        for selector, num in (("section ul:not(.keys) path.mark", 8), ("ul rect.part", len(STAGES))):
            boxes = [one.bounding_box() for one in page.query_selector_all(selector)]
            middles = [(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) for box in boxes]
            seen[selector, vision] = [image.getpixel(middle) for middle in middles]
            assert len(boxes) == num
            pairs = itertools.combinations(seen[selector, vision], 2)
            assert min(math.dist(one, other) for one, other in pairs) > MIN_DIFFERENCE
            assert vision == "none" or seen[selector, vision] != seen[selector, "none"]  # it is simulated
    page.close()


def test_few_and_many_figures_fit(browser: Any, tmp_path: Path) -> None:
    few = {"methods": [{"name": "ours", "speedup": 1e-4, "acceptance_rate_per_position": [0.5], "draft_lens": [0]}]}
    few["drift"] = [{"verifier": "typical", "posterior_threshold": 0.3, "log_likelihood_per_token": -1.0}]
    many = make_result()
    for entry in many["methods"]:
        entry |= {"acceptance_rate_per_position": [0.5] * 128, "draft_lens": list(range(129)) * 50}
        entry["speedup"] = {"min": 900.0, "median": 1234.5, "max": 2000.0}
    many["drift"] = [row | {"log_likelihood_per_token": -1000.123} for row in many["drift"]]
    for result in (few, many):
        path = write_html(result, tmp_path / "report.html")
        assert look_at(browser, path, PHONE).problems(PHONE) == []


def test_what_is_looked_for_is_found(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        """<!DOCTYPE html><body><script>missing()</script><img src="other.png"><p style="width:900px">wide</p>
        <p style="font-size:11px">tiny</p><p style="color:#ccc">pale</p>
        <svg class="plot" aria-label="empty" width="200" height="20"></svg>
        <svg class="plot" aria-label="bad" width="200" height="20"><rect class="mark" width="0" height="0"/>
        <rect class="mark" x="190" width="50" height="5"/><rect class="mark" width="9" height="9" fill="#eee"/>
        <text x="10" y="12">one</text><text x="12" y="12">two</text><text x="190" y="12">three</text></svg>"""
    )
    found = "\n".join(look_at(browser, path, PHONE).problems(PHONE))
    for problem in (
        f"also asked for: {(tmp_path / 'other.png').as_uri()}", "console: ", "error: ", "px wide", "small: tiny",
        "faint: pale", "not drawn: {'label': 'empty'", "undrawn: {'label': 'bad'", "outside: {'label': 'bad'",
        "faint: {'label': 'bad'", "one over two", "cut: three",
    ):  # fmt: skip
        assert problem in found, f"{problem} in {found}"
