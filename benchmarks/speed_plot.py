"""Draws the speed-ups of `end_to_end.py` as SVG for README and docs, light and dark; nothing is measured.

python benchmarks/speed_plot.py
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from _harness import RESULTS, ROOT, read_results

PICTURES = ROOT / "docs" / "pictures"
BATCH_SIZES = (1, 8)
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""
WIDTH, LEFT, PANEL, GAP, BAR, LINE, TOP = 860, 236, 268, 44, 18, 30, 64


class Method(NamedTuple):
    """One bar of each panel."""

    label: str
    engine: str  # as the results name it
    num_assistant_tokens: int | None
    is_compiled: bool
    colour: str  # of the Okabe-Ito palette, or grey for plain decoding


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


def picture(results: dict[str, Any], theme: Theme) -> str:
    """The SVG of greedy decoding with the bundled pair in float32."""
    spreads = {batch_size: spreads_of(results["rows"], batch_size) for batch_size in BATCH_SIZES}
    most = max(spread["max"] for panel_spreads in spreads.values() for spread in panel_spreads if spread)
    height = TOP + LINE * len(METHODS) + 44
    environment = results["environment"]
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {FONT}>',
        f"<title>Speed-up over plain generate(), {' and '.join(map(rows_in_words, BATCH_SIZES))}</title>",
        text(16, 24, "Speed-up over plain generate(), greedy decoding", theme.text, 'font-size="16" font-weight="600"'),
    ]
    for number, method in enumerate(METHODS):
        middle = TOP + LINE * number + BAR / 2
        parts.append(text(LEFT - 12, middle + 5, method.label, theme.text, 'font-size="14" text-anchor="end"'))
    for number, batch_size in enumerate(BATCH_SIZES):
        start = LEFT + number * (PANEL + GAP)
        parts += panel(start, rows_in_words(batch_size), spreads[batch_size], most, theme)
    source = (
        f"bundled pair of 7 M and 1.5 M parameters, float32, {environment['threads']} cores of an "
        f"{device(environment['device'])}, {environment['date']}; bars: medians, lines: minimum to maximum"
    )
    parts.append(text(16, height - 12, source, theme.faint, 'font-size="12"'))
    return "\n".join([*parts, "</svg>", ""])


def panel(start: float, title: str, spreads: list[dict[str, float] | None], most: float, theme: Theme) -> list[str]:
    """The bars of one number of rows; all panels have the scale of the largest value."""
    scale = (PANEL - 24) / most  # room for the last label
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
            parts.append(text(start, top + BAR / 2 + 4.5, "not measured", theme.faint, 'font-size="13"'))
            continue
        width, middle = spread["median"] * scale, top + BAR / 2
        parts.append(f'<rect x="{start}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2" fill="{method.colour}"/>')
        end = start + width
        if spread["max"] > spread["min"]:
            left, right = start + spread["min"] * scale, start + spread["max"] * scale
            path = f"M{left:.1f} {middle - 4}v8M{left:.1f} {middle}H{right:.1f}M{right:.1f} {middle - 4}v8"
            parts.append(f'<path d="{path}" stroke="{theme.text}" stroke-width="1.2" fill="none"/>')
            end = max(end, right)
        style = 'font-size="13" font-weight="600"'
        parts.append(text(end + 6, middle + 4.5, f"{spread['median']:.2f}x", theme.text, style))
    return parts


def spreads_of(rows: list[dict[str, Any]], batch_size: int) -> list[dict[str, float] | None]:
    """Speed-ups over plain decoding of each of `METHODS`: min, median, max; None where it was not measured."""
    cell = ("pair", "float32", "greedy", batch_size)
    cells = [row for row in rows if (row["subject"], row["dtype"], row["mode"], row["batch_size"]) == cell]
    by_method = {key_of(row): row["over_plain"] for row in cells if row["verifier"] is None}
    return [by_method.get((method.engine, method.num_assistant_tokens, method.is_compiled)) for method in METHODS]


def key_of(row: dict[str, Any]) -> tuple[str, int | None, bool]:
    return row["engine"], row["num_assistant_tokens"], row["is_compiled"]


def rows_in_words(batch_size: int) -> str:
    return "1 prompt" if batch_size == 1 else f"a batch of {batch_size}"


def device(name: str) -> str:
    return name.replace("(R)", "").partition(" Processor")[0] + " CPU"


def text(x: float, y: float, words: str, colour: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" {style}>{escape(words)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that holds the JSON")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder for the pictures")
    args = parser.parse_args()
    results = read_results("end_to_end", args.results)
    for name, theme in THEMES.items():
        path = args.pictures / f"speed-{name}.svg"
        path.write_text(picture(results, theme), encoding="utf-8")
        print(f"drawn in {path}")


if __name__ == "__main__":
    main()
