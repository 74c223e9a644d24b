"""Draw the speed-ups of `end_to_end.py` as SVG for README and docs, light and dark.

python benchmarks/speed_plot.py

Nothing is measured.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from _harness import RESULTS, ROOT, read_results

PICTURES = ROOT / "docs" / "pictures"
BATCH_SIZES = (1, 8)
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""
LEFT, PANEL, GAP, BAR, LINE, TOP, MARGIN = 236, 268, 44, 18, 30, 64, 44


class Method(NamedTuple):
    """One bar of each panel."""

    label: str
    engine: str  # its name in the results
    num_assistant_tokens: int | None
    is_compiled: bool
    colour: str  # from the Okabe-Ito palette, or grey for plain decoding


class Theme(NamedTuple):
    """Colours of text and lines."""

    text: str
    faint: str
    line: str


METHODS = (
    Method("plain generate()", "plain", None, False, "#8a8f98"),
    Method("transformers' assisted, K = 5", "transformers", 5, False, "#D55E00"),
    Method("hf_speculate, default", "ours", None, False, "#56B4E9"),
    Method("hf_speculate, K = 5", "ours", 5, False, "#0072B2"),
    Method("plain, compiled", "plain", None, True, "#8a8f98"),
    Method("transformers', K = 5, compiled", "transformers", 5, True, "#D55E00"),
    Method("hf_speculate, K = 5, compiled", "ours", 5, True, "#009E73"),
)
THEMES = {
    "light": Theme(text="#1f2328", faint="#59636e", line="#d1d9e0"),
    "dark": Theme(text="#f0f6fc", faint="#9198a1", line="#3d444d"),
}


class Layout(NamedTuple):
    """Positions of the panels.

    They stand side by side, or one below the other for narrow screens.
    """

    is_narrow: bool

    @property
    def width(self) -> float:
        return (
            LEFT
            + PANEL
            + MARGIN
            + (0 if self.is_narrow else (len(BATCH_SIZES) - 1) * (PANEL + GAP))
        )

    @property
    def bottom(self) -> float:
        """Lower end of the last bars, with a margin."""
        return self.origin(len(BATCH_SIZES) - 1)[1] + TOP + LINE * len(METHODS) + 16

    def origin(self, number: int) -> tuple[float, float]:
        """Return the left end and the vertical shift of a panel's bars."""
        return (
            (LEFT, number * (LINE * len(METHODS) + GAP))
            if self.is_narrow
            else (LEFT + number * (PANEL + GAP), 0)
        )


LAYOUTS = {"": Layout(is_narrow=False), "narrow-": Layout(is_narrow=True)}


def picture(results: dict[str, Any], theme: Theme, layout: Layout) -> str:
    """Return the SVG of greedy decoding with the bundled pair in float32."""
    spreads = {batch_size: spreads_of(results["rows"], batch_size) for batch_size in BATCH_SIZES}
    max_speedup = max(
        spread["max"] for panel_spreads in spreads.values() for spread in panel_spreads if spread
    )
    sources = sources_of(results["environment"])
    lines = sources if layout.is_narrow else ["; ".join(sources)]
    height = layout.bottom + 16 * len(lines)
    size = f'viewBox="0 0 {layout.width} {height}" width="{layout.width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {FONT}>',
        (
            "<title>Speed-up over plain generate(), "
            f"{' and '.join(map(rows_in_words, BATCH_SIZES))}</title>"
        ),
        text(
            16,
            24,
            "Speed-up over plain generate(), greedy decoding",
            theme.text,
            'font-size="16" font-weight="600"',
        ),
    ]
    for number, batch_size in enumerate(BATCH_SIZES):
        left, shift = layout.origin(number)
        if left == LEFT:  # methods are named once on a line
            for line_number, method in enumerate(METHODS):
                middle = TOP + shift + LINE * line_number + BAR / 2
                parts.append(
                    text(
                        LEFT - 12,
                        middle + 5,
                        method.label,
                        theme.text,
                        'font-size="14" text-anchor="end"',
                    )
                )
        words = rows_in_words(batch_size)
        parts.append(f'<g transform="translate(0 {shift})">')
        parts += [*panel(left, words, spreads[batch_size], max_speedup, theme), "</g>"]
    for number, words in enumerate(lines):
        parts.append(text(16, layout.bottom + 16 * number, words, theme.faint, 'font-size="12"'))
    return "\n".join([*parts, "</svg>", ""])


def sources_of(environment: dict[str, Any]) -> list[str]:
    """Return lines on the measurement and the meaning of the marks.

    Each is a line on narrow screens.
    """
    return [
        "bundled pair of 7 M and 1.5 M parameters, float32",
        (
            f"{environment['threads']} cores of an {device(environment['device'])}, "
            f"{environment['date']}"
        ),
        "bars: medians, lines: minimum to maximum",
    ]


def panel(
    start: float,
    title: str,
    spreads: list[dict[str, float] | None],
    max_speedup: float,
    theme: Theme,
) -> list[str]:
    """Draw the bars of one number of rows; all panels share the scale of the largest value."""
    scale = (PANEL - 24) / max_speedup  # leaves room for the last label
    bottom = TOP + LINE * len(METHODS) - (LINE - BAR) + 6
    plain_x = start + scale
    style = f'stroke="{theme.line}" stroke-dasharray="3 3"'
    parts = [
        text(start, TOP - 14, title, theme.text, 'font-size="14" font-weight="600"'),
        f'<line x1="{plain_x:.1f}" y1="{TOP - 6}" x2="{plain_x:.1f}" y2="{bottom}" {style}/>',
    ]
    for number, (method, spread) in enumerate(zip(METHODS, spreads, strict=True)):
        top = TOP + LINE * number
        if spread is None:
            parts.append(
                text(start, top + BAR / 2 + 4.5, "not measured", theme.faint, 'font-size="13"')
            )
            continue
        width, middle = spread["median"] * scale, top + BAR / 2
        parts.append(
            f'<rect x="{start}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2" '
            f'fill="{method.colour}"/>'
        )
        end = start + width
        if spread["max"] > spread["min"]:
            left, right = start + spread["min"] * scale, start + spread["max"] * scale
            path = f"M{left:.1f} {middle - 4}v8M{left:.1f} {middle}"
            path += f"H{right:.1f}M{right:.1f} {middle - 4}v8"
            parts.append(f'<path d="{path}" stroke="{theme.text}" stroke-width="1.2" fill="none"/>')
            end = max(end, right)
        style = 'font-size="13" font-weight="600"'
        parts.append(text(end + 6, middle + 4.5, f"{spread['median']:.2f}x", theme.text, style))
    return parts


def spreads_of(rows: list[dict[str, Any]], batch_size: int) -> list[dict[str, float] | None]:
    """Return min, median and max speed-up over plain decoding for each of `METHODS`.

    An entry is None if the method was not measured.
    """
    cell = ("pair", "float32", "greedy", batch_size)
    cells = [
        row
        for row in rows
        if (row["subject"], row["dtype"], row["mode"], row["batch_size"]) == cell
    ]
    by_method = {key_of(row): row["over_plain"] for row in cells if row["verifier"] is None}
    return [
        by_method.get((method.engine, method.num_assistant_tokens, method.is_compiled))
        for method in METHODS
    ]


def key_of(row: dict[str, Any]) -> tuple[str, int | None, bool]:
    return row["engine"], row["num_assistant_tokens"], row["is_compiled"]


def rows_in_words(batch_size: int) -> str:
    return "1 prompt" if batch_size == 1 else f"a batch of {batch_size}"


def device(name: str) -> str:
    return name.replace("(R)", "").partition(" Processor")[0] + " CPU"


def text(x: float, y: float, words: str, colour: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" {style}>{escape(words)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder for the pictures")
    args = parser.parse_args()
    results = read_results("end_to_end", args.results)
    for (prefix, layout), (name, theme) in itertools.product(LAYOUTS.items(), THEMES.items()):
        path = args.pictures / f"speed-{prefix}{name}.svg"
        path.write_text(picture(results, theme, layout), encoding="utf-8")
        print(f"drawn in {path}")


if __name__ == "__main__":
    main()
