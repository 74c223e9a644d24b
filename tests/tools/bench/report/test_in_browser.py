"""A browser draws every plot of the page, asks for nothing else, and can be read on a phone."""

import shutil

import pytest

from hf_speculate.tools.bench.report.page import write_html
from tests.tools.bench.report.results import make_result

pytestmark = pytest.mark.browser

PHONE, DESKTOP = 360, 1280
MIN_LETTER_PX = 12
# Three bars a method, positions, rounds, a stack a method, a line a category, drift.
NUM_PLOTS = 3 * 5 + 1 + 1 + 4 + 4 + 3
# What a reader would notice, in one call.
LOOK = """() => {
  const box = one => one.getBoundingClientRect();
  const inside = (one, frame) =>
    Math.min(one.left - frame.left, frame.right - one.right, one.top - frame.top, frame.bottom - one.bottom) >= -1;
  const problems = [];
  if (document.documentElement.scrollWidth > window.innerWidth) problems.push('too wide');
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement, scale = parent.getScreenCTM ? parent.getScreenCTM().a : 1;
    if (!node.data.trim() || parent.localName === 'title' || !box(parent).width) continue;
    if (parseFloat(getComputedStyle(parent).fontSize) * scale < MIN_LETTER_PX) problems.push('small: ' + node.data);
  }
  for (const svg of document.querySelectorAll('svg')) {
    const marks = [...svg.querySelectorAll('.mark')], labels = [...svg.querySelectorAll('text')];
    const name = svg.getAttribute('aria-label');
    if (svg.matches('.plot') && (!marks.length || box(svg).width < 100)) problems.push('not drawn: ' + name);
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
}""".replace("MIN_LETTER_PX", str(MIN_LETTER_PX))


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


def look_at(browser, path, width, scheme="light"):
    """What is wrong with a page, and its number of plots."""
    page, problems = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme), []
    page.on("request", lambda request: request.url != path.as_uri() and problems.append(f"asked for: {request.url}"))
    page.on("console", lambda message: problems.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.goto(path.as_uri(), wait_until="load")
    problems += page.evaluate(LOOK)
    num_plots = len(page.query_selector_all("svg.plot"))
    page.close()
    return problems, num_plots


@pytest.mark.parametrize(("scheme", "width"), [("light", PHONE), ("dark", DESKTOP)])
def test_the_page_is_drawn_and_read(browser, tmp_path, width, scheme):
    assert look_at(browser, write_html(make_result(), tmp_path / "report.html"), width, scheme) == ([], NUM_PLOTS)
