"""Lays out the plots: what is drawn where.

Widths are percents of the plot's width, so that a plot fills a screen of any size and its text keeps its size; heights
are pixels. `page.html` draws the layout.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hf_speculate.tools.bench.report.scales import Axis, Tick, axis_of_counts, axis_of_values, rounded_axis
from hf_speculate.tools.bench.report.values import TIMES, Spread, short

NUM_HUES = 8  # classes c0, c1, ... of page.html
_SHAPES = (  # paths around (0, 0): circle, square, triangle, diamond, plus, inverted triangle, pentagon, cross
    "M5.5 0A5.5 5.5 0 1 1-5.5 0A5.5 5.5 0 1 1 5.5 0Z",
    "M-5-5H5V5H-5Z",
    "M0-6.5L6.5 5H-6.5Z",
    "M0-7L7 0L0 7L-7 0Z",
    "M-2-6.5H2V-2H6.5V2H2V6.5H-2V2H-6.5V-2H-2Z",
    "M0 6.5L6.5-5H-6.5Z",
    "M0-6.5L6.2-2L3.8 5.3H-3.8L-6.2-2Z",
    "M-6-3.2L-3.2-6L0-2.8L3.2-6L6-3.2L2.8 0L6 3.2L3.2 6L0 2.8L-3.2 6L-6 3.2L-2.8 0Z",
)
_LABEL_HEIGHT = 18.0  # pixels, of a name beside a curve
_MAX_POINTS = 160  # of a curve; more are averaged
_MAX_DOTS = 25  # of a curve; more are a line alone
_LEFT, _RIGHT = 13.0, 95.0  # of a plot with numbers beside it
_TOP, _BOTTOM = 8.0, 172.0
_PLAIN = 1.0  # plain decoding's speed, in times itself


class Style(NamedTuple):
    """Colour and marker of a series, the same in all plots."""

    hue: int
    shape: str  # SVG path

    @classmethod
    def of(cls, index: int) -> "Style":
        """Style of the series with an index; the first 64 differ in colour or marker."""
        return cls(index % NUM_HUES, _SHAPES[(index + index // NUM_HUES) % len(_SHAPES)])


class Key(NamedTuple):
    """Name of a series, beside the end of its curve (`top`, pixels) or in a legend."""

    name: str
    style: Style
    is_dashed: bool = False
    top: float = 0.0


class Part(NamedTuple):
    """A piece of a stacked bar; its shade is an index."""

    start: float
    width: float
    shade: int
    label: str


class Bar(NamedTuple):
    """A length with its spread."""

    name: str
    value: str
    style: Style
    is_open: bool  # drawn as an outline
    end: float
    low: float
    high: float


class BarPlot(NamedTuple):
    """Bars from 0 on."""

    title: str
    note: str
    bars: list[Bar]
    ticks: list[Tick]
    reference: float | None
    kind: str = "bars"


class Stack(NamedTuple):
    """A bar of pieces that fill it."""

    name: str
    value: str
    parts: list[Part]


class StackPlot(NamedTuple):
    """Bars of pieces."""

    title: str
    note: str
    names: Sequence[str]  # of the parts, by shade
    stacks: list[Stack]
    ticks: list[Tick]
    kind: str = "stacks"


class Dot(NamedTuple):
    """A value on a line."""

    place: float
    style: Style
    label: str


class DotRow(NamedTuple):
    """The values of one group."""

    name: str
    dots: list[Dot]


class DotPlot(NamedTuple):
    """Groups below one another, a dot for each value."""

    title: str
    note: str
    keys: list[Key]
    rows: list[DotRow]
    ticks: list[Tick]
    reference: float
    kind: str = "dots"


class Point(NamedTuple):
    """A place of a curve."""

    x: float  # percent
    y: float  # pixels
    label: str


class Curve(NamedTuple):
    """Points that are joined."""

    style: Style
    points: list[Point]
    has_dots: bool


class CurvePlot(NamedTuple):
    """Curves over one axis."""

    title: str
    note: str
    keys: list[Key]
    curves: list[Curve]
    references: list[tuple[float, Style]]  # pixels: lines across
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    x_label: str
    kind: str = "curves"


Plot = BarPlot | StackPlot | DotPlot | CurvePlot
Series = Mapping[str, Sequence[tuple[float, float]]]  # name -> (x, y)


def plot_bars(
    title: str, note: str, bars: Sequence[tuple[str, Spread, Style, bool]], unit: str = TIMES, decimals: int = 2
) -> BarPlot:
    """Bars from 0; a line marks plain decoding where values are speed-ups."""
    is_speedup = unit == TIMES
    known = [0.0, *([_PLAIN] if is_speedup else []), *(value.high for _, value, _, _ in bars)]
    axis = rounded_axis(known, 0.0, 100.0)
    drawn = [
        Bar(name, value.text(decimals, unit), style, is_open, *map(axis.place, (value.middle, value.low, value.high)))
        for name, value, style, is_open in bars
    ]
    return BarPlot(title, note, drawn, axis.ticks(unit), axis.place(_PLAIN) if is_speedup else None)


def plot_stacks(title: str, note: str, parts: Sequence[str], stacks: Mapping[str, Sequence[float]]) -> StackPlot:
    """Shares of a whole."""
    drawn = []
    for name, seconds in stacks.items():
        total, start, pieces = sum(seconds), 0.0, []
        for shade, (part, taken) in enumerate(zip(parts, seconds, strict=True)):
            width = 100 * taken / total
            pieces.append(Part(round(start, 2), round(width, 2), shade, f"{part}: {short(taken)} s, {width:.1f} %"))
            start += width
        drawn.append(Stack(name, f"{short(total)} s", pieces))
    ticks = [Tick(float(place), f"{place} %") for place in range(0, 101, 25)]
    return StackPlot(title, note, parts, drawn, ticks)


def plot_dots(
    title: str, note: str, groups: Mapping[str, Sequence[tuple[str, float]]], styles: Mapping[str, Style]
) -> DotPlot:
    """Speed-ups by group."""
    values = [value for dots in groups.values() for _, value in dots]
    axis = rounded_axis([_PLAIN, *values], 6.0, 94.0)
    drawn = [
        DotRow(
            name,
            [Dot(axis.place(value), styles[method], f"{method}: {value:.2f}{TIMES}") for method, value in dots],
        )
        for name, dots in groups.items()
    ]
    used = {method for dots in groups.values() for method, _ in dots}
    keys = [Key(method, style) for method, style in styles.items() if method in used]
    return DotPlot(title, note, keys, drawn, axis.ticks(TIMES), axis.place(_PLAIN))


def plot_positions(
    title: str, note: str, curves: Mapping[str, Sequence[float]], styles: Mapping[str, Style]
) -> CurvePlot:
    """Shares of one by position in the draft, the first position being 1."""
    series = {name: [(float(place), value) for place, value in enumerate(values, 1)] for name, values in curves.items()}
    x_axis = axis_of_counts(max(map(len, curves.values())), _LEFT, _RIGHT)
    y_axis = rounded_axis([0.0, 1.0], _BOTTOM, _TOP, num_ticks=5)
    return _curves(title, note, series, styles, x_axis, y_axis, "position in the draft")


def plot_rounds(title: str, note: str, curves: Mapping[str, Sequence[float]], styles: Mapping[str, Style]) -> CurvePlot:
    """Counts by round, long calls averaged over neighbouring rounds."""
    series = {name: _thinned(values) for name, values in curves.items()}
    x_axis = axis_of_counts(max(map(len, curves.values())), _LEFT, _RIGHT)
    y_axis = rounded_axis([0.0, 1.0, *(value for values in curves.values() for value in values)], _BOTTOM, _TOP)
    return _curves(title, note, series, styles, x_axis, y_axis, "round")


def plot_thresholds(
    title: str, note: str, curves: Series, references: Mapping[str, float], styles: Mapping[str, Style], x_label: str
) -> CurvePlot:
    """Values over a threshold, with lines across for methods without one."""
    x_axis = axis_of_values([x for points in curves.values() for x, _ in points], _LEFT, _RIGHT)
    values = [y for points in curves.values() for _, y in points]
    y_axis = rounded_axis([*values, *references.values()], _BOTTOM, _TOP)
    series = {name: sorted(points) for name, points in curves.items()}
    plot = _curves(title, note, series, styles, x_axis, y_axis, x_label)
    lines = [(y_axis.place(value), styles[name]) for name, value in references.items()]
    keys = [Key(name, styles[name], True, y_axis.place(value)) for name, value in references.items()]
    return plot._replace(references=lines, keys=_apart(plot.keys + keys))


def _curves(
    title: str, note: str, series: Series, styles: Mapping[str, Style], x_axis: Axis, y_axis: Axis, x_label: str
) -> CurvePlot:
    curves, keys = [], []
    for name, points in series.items():
        places = [Point(x_axis.place(x), y_axis.place(y), f"{name}, {x_label} {x:g}: {short(y)}") for x, y in points]
        curves.append(Curve(styles[name], places, len(places) <= _MAX_DOTS))
        keys.append(Key(name, styles[name], top=places[-1].y))
    return CurvePlot(title, note, _apart(keys), curves, [], x_axis.ticks(), y_axis.ticks(), x_label)


def _apart(keys: Sequence[Key]) -> list[Key]:
    """Move names that would overlap downwards, then all of them up as far as they leave the plot."""
    ordered = sorted(keys, key=lambda key: key.top)
    tops: list[float] = []
    for key in ordered:
        tops.append(max(key.top, tops[-1] + _LABEL_HEIGHT) if tops else key.top)
    for index in reversed(range(len(tops))):
        highest = _BOTTOM if index == len(tops) - 1 else tops[index + 1] - _LABEL_HEIGHT
        tops[index] = max(min(tops[index], highest), _TOP + index * _LABEL_HEIGHT)
    return [key._replace(top=round(top, 2)) for key, top in zip(ordered, tops, strict=True)]


def _thinned(values: Sequence[float]) -> list[tuple[float, float]]:
    """(round, value) at most _MAX_POINTS times: means of equally many neighbours, at the middle one's place."""
    width = -(-len(values) // _MAX_POINTS)
    pieces = [(start, values[start : start + width]) for start in range(0, len(values), width)]
    return [(start + (len(piece) + 1) / 2, sum(piece) / len(piece)) for start, piece in pieces]
