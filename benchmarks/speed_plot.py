"""Draw the speed-ups from `ten_tasks.py` as light and dark SVG plots for README and docs.

python benchmarks/speed_plot.py

Nothing is measured.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import readme_tables
import ten_tasks
from _harness import RESULTS, ROOT, read_results

PICTURES = ROOT / "docs" / "pictures"
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""
LEFT, GAP, BAR, LINE, TOP, MARGIN = 176, 36, 18, 30, 92, 64
PANELS = tuple((kind, length) for length in (64, 128) for kind in readme_tables.TASK_KINDS)
NUM_COLUMNS = 2
TITLE, SETTING = "Speed over plain generate()", "SmolLM2, prompt lookup"
MAX_SHOWN = 2.0  # speed-up at the right end of a panel; longer ranges end in an arrow


class Method(NamedTuple):
    """Method with a bar in each panel."""

    label: str
    name: str  # name in the results
    colour: str  # Okabe-Ito palette, darkened for white labels, or grey for plain decoding


class Theme(NamedTuple):
    """Colours of text and lines, and of the page behind them."""

    text: str
    faint: str
    line: str
    page: str


METHODS = (
    Method("plain generate()", ten_tasks.PLAIN, "#8a8f98"),
    Method("transformers, K = 5", ten_tasks.PEERS[0], "#c45400"),
    Method("transformers, K = 10", ten_tasks.PEERS[1], "#9c4400"),
    Method("hf_speculate, default", "ours, lookup", "#0072B2"),
)
THEMES = {
    "light": Theme(text="#1f2328", faint="#59636e", line="#d1d9e0", page="#ffffff"),
    "dark": Theme(text="#f0f6fc", faint="#9198a1", line="#3d444d", page="#0d1117"),
}


class Layout(NamedTuple):
    """Positions of the panels, which are side by side, or stacked for narrow screens."""

    is_narrow: bool

    @property
    def num_columns(self) -> int:
        return 1 if self.is_narrow else NUM_COLUMNS

    @property
    def panel_width(self) -> int:
        """Width at which letters stay readable on a phone, or in a column of text."""
        return 220 if self.is_narrow else 264

    @property
    def width(self) -> float:
        return LEFT + self.num_columns * (self.panel_width + MARGIN) + (self.num_columns - 1) * GAP

    @property
    def bottom(self) -> float:
        """Upper end of the lines below the bars."""
        return self.origin(len(PANELS) - 1)[1] + TOP + LINE * len(METHODS) + 20

    def origin(self, number: int) -> tuple[float, float]:
        """Return the left end and the upper shift of a panel's bars."""
        row, column = divmod(number, self.num_columns)
        return LEFT + column * (self.panel_width + MARGIN + GAP), row * (LINE * len(METHODS) + GAP)


LAYOUTS = {"": Layout(is_narrow=False), "narrow-": Layout(is_narrow=True)}


def picture(results: dict[str, Any], theme: Theme, layout: Layout) -> str:
    """Return an SVG with one panel for the tasks that copy and one for the questions."""
    lines = sources_of(results["environment"])
    lines = lines if layout.is_narrow else ["; ".join(lines[:2]), *lines[2:]]
    height = layout.bottom + 16 * len(lines)
    size = f'viewBox="0 0 {layout.width} {height}" width="{layout.width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {FONT}>',
        f"<title>{TITLE}: {SETTING}</title>",
        text(16, 24, TITLE, theme.text, 'font-size="16" font-weight="600"'),
        text(16, 45, SETTING, theme.faint, 'font-size="14"'),
    ]
    for number, (kind, length) in enumerate(PANELS):
        left, shift = layout.origin(number)
        if left == LEFT:  # methods are named once per line of panels
            for place, method in enumerate(METHODS):
                middle = TOP + shift + LINE * place + BAR / 2
                style = 'font-size="14" text-anchor="end"'
                parts.append(text(LEFT - 12, middle + 5, method.label, theme.text, style))
        spreads = ten_tasks.spreads_of(results["rows"], length, kind)
        parts.append(f'<g transform="translate(0 {shift})">')
        name = f"{readme_tables.TASK_KINDS[kind]}, {length} new tokens"
        parts += [*panel(left, layout.panel_width, name, spreads, theme), "</g>"]
    for number, words in enumerate(lines):
        parts.append(text(16, layout.bottom + 16 * number, words, theme.faint, 'font-size="12"'))
    return "\n".join([*parts, "</svg>", ""])


def sources_of(environment: dict[str, Any]) -> list[str]:
    """Return the measured setting and the legend, on separate lines for narrow screens."""
    cores = f"{environment['threads']} core{'s' * (environment['threads'] > 1)}"
    return [
        "greedy, one prompt at a time, equal texts",
        f"{cores} of an {device(environment['device'])}, {environment['date']}",
        "bars: medians over tasks, lines: slowest to fastest task",
    ]


def panel(
    start: float,
    width: float,
    title: str,
    spreads: dict[str, tuple[float, float, float]],
    theme: Theme,
) -> list[str]:
    """Return the bars for one kind of task."""

    def position(speed: float) -> float:
        return start + min(speed, MAX_SHOWN) * width / MAX_SHOWN

    bottom = TOP + LINE * len(METHODS) - (LINE - BAR) + 6
    plain_x = position(1)
    dashes = f'stroke="{theme.line}" stroke-dasharray="3 3"'
    parts = [
        text(start, TOP - 14, title, theme.text, 'font-size="14" font-weight="600"'),
        f'<line x1="{plain_x:.1f}" y1="{TOP - 6}" x2="{plain_x:.1f}" y2="{bottom}" {dashes}/>',
    ]
    for number, method in enumerate(METHODS):
        middle_speed, least, greatest = spreads[method.name]
        top = TOP + LINE * number
        middle = top + BAR / 2
        end = position(middle_speed)
        parts.append(
            f'<rect x="{start}" y="{top}" width="{end - start:.1f}" height="{BAR}" rx="2" '
            f'fill="{method.colour}"/>'
        )
        label = f"{middle_speed:.2f}x"
        bold = 'font-size="13" font-weight="600"'
        if greatest == least:
            parts.append(text(end + 6, middle + 4.5, label, theme.text, bold))
            continue
        left, right = position(least), position(greatest)
        path = f"M{left:.1f} {middle - 4}v8M{left:.1f} {middle}H{right:.1f}"
        if greatest > MAX_SHOWN:  # the label is inside the bar
            path += "m-5 -4l5 4l-5 4"
            parts.append(text(start + 6, middle + 4.5, label, "#ffffff", bold))
            words = f"to {greatest:.1f}x"
            parts.append(text(right + 6, middle + 4.5, words, theme.text, 'font-size="13"'))
        else:
            path += f"M{right:.1f} {middle - 4}v8"
            parts.append(text(max(end, right) + 6, middle + 4.5, label, theme.text, bold))
        # A wider line in the page's colour sets the range off from its bar.
        for colour, stroke_width in ((theme.page, 3.2), (theme.text, 1.4)):
            parts.append(
                f'<path d="{path}" stroke="{colour}" stroke-width="{stroke_width}" fill="none"/>'
            )
    return parts


def device(name: str) -> str:
    return name.replace("(R)", "").partition(" Processor")[0] + " CPU"


def text(x: float, y: float, words: str, colour: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" {style}>{escape(words)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that holds the JSON")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder for the pictures")
    args = parser.parse_args()
    results = read_results(ten_tasks.NAME, args.results)
    for (prefix, layout), (name, theme) in itertools.product(LAYOUTS.items(), THEMES.items()):
        path = args.pictures / f"speed-{prefix}{name}.svg"
        path.write_text(picture(results, theme, layout), encoding="utf-8")
        print(f"drawn in {path}")


if __name__ == "__main__":
    main()
