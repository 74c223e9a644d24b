"""Lays out the plots: what is drawn where.

Widths are percents of the plot's own width, so that a plot fills a screen of any size while its letters keep theirs;
heights are pixels. `page.html` draws what is laid out here.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hf_speculate.tools.bench.report.scales import Axis, Tick, axis_of_counts, axis_of_values, rounded_axis
from hf_speculate.tools.bench.report.values import TIMES, Spread, short

NUM_HUES = 8  # classes c0, c1, ... of page.html
_MAX_POINTS = 160  # of a curve; more are averaged
_MAX_DOTS = 25  # of a curve; more are a line alone
_LEFT, _RIGHT = 13.0, 95.0  # of a plot with numbers beside it
_TOP, _BOTTOM = 8.0, 172.0
_PLAIN = 1.0  # plain decoding's speed, in times itself


class Key(NamedTuple):
    """What a colour stands for."""

    name: str
    hue: int
    is_dashed: bool = False


class Bar(NamedTuple):
    """A length with its spread."""

    name: str
    value: str
    hue: int
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
    reference: float
    kind: str = "bars"


class Part(NamedTuple):
    """A piece of a stacked bar."""

    start: float
    width: float
    hue: int
    label: str


class Stack(NamedTuple):
    """A bar of pieces that fill it."""

    name: str
    value: str
    parts: list[Part]


class StackPlot(NamedTuple):
    """Bars of pieces."""

    title: str
    note: str
    keys: list[Key]
    stacks: list[Stack]
    ticks: list[Tick]
    kind: str = "stacks"


class Dot(NamedTuple):
    """A value on a line."""

    place: float
    hue: int
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

    hue: int
    points: list[Point]
    has_dots: bool


class CurvePlot(NamedTuple):
    """Curves over one axis."""

    title: str
    note: str
    keys: list[Key]
    curves: list[Curve]
    references: list[tuple[float, int]]  # pixels, hue: lines across
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    x_label: str
    kind: str = "curves"


Plot = BarPlot | StackPlot | DotPlot | CurvePlot
Series = Mapping[str, Sequence[tuple[float, float]]]  # name -> (x, y)


def plot_bars(title: str, note: str, bars: Sequence[tuple[str, Spread, int, bool]]) -> BarPlot:
    """Times plain decoding's speed."""
    axis = rounded_axis([0.0, _PLAIN, *(value.high for _, value, _, _ in bars)], 0.0, 100.0)
    drawn = [
        Bar(name, value.text(TIMES), hue, is_open, *(axis.place(x) for x in (value.middle, value.low, value.high)))
        for name, value, hue, is_open in bars
    ]
    return BarPlot(title, note, drawn, axis.ticks(TIMES), axis.place(_PLAIN))


def plot_stacks(title: str, note: str, parts: Sequence[str], stacks: Mapping[str, Sequence[float]]) -> StackPlot:
    """Shares of a whole."""
    drawn = []
    for name, seconds in stacks.items():
        total, start, pieces = sum(seconds), 0.0, []
        for hue, (part, taken) in enumerate(zip(parts, seconds, strict=True)):
            width = 100 * taken / total
            label = f"{part}: {short(taken)} s, {width:.1f} %"
            pieces.append(Part(round(start, 2), round(width, 2), hue % NUM_HUES, label))
            start += width
        drawn.append(Stack(name, f"{short(total)} s", pieces))
    keys = [Key(part, hue % NUM_HUES) for hue, part in enumerate(parts)]
    ticks = [Tick(float(place), f"{place} %") for place in range(0, 101, 25)]
    return StackPlot(title, note, keys, drawn, ticks)


def plot_dots(
    title: str, note: str, groups: Mapping[str, Sequence[tuple[str, float]]], hues: Mapping[str, int]
) -> DotPlot:
    """Times plain decoding's speed, by group."""
    values = [value for dots in groups.values() for _, value in dots]
    axis = rounded_axis([_PLAIN, *values], 6.0, 94.0)
    drawn = [
        DotRow(
            name, [Dot(axis.place(value), hues[method], f"{method}: {short(value)}{TIMES}") for method, value in dots]
        )
        for name, dots in groups.items()
    ]
    used = {method for dots in groups.values() for method, _ in dots}
    keys = [Key(method, hue) for method, hue in hues.items() if method in used]
    return DotPlot(title, note, keys, drawn, axis.ticks(TIMES), axis.place(_PLAIN))


def plot_positions(title: str, note: str, curves: Mapping[str, Sequence[float]], hues: Mapping[str, int]) -> CurvePlot:
    """Shares of one by place in the draft, the first place being 1."""
    series = {name: [(float(place), value) for place, value in enumerate(values, 1)] for name, values in curves.items()}
    x_axis = axis_of_counts(max(map(len, curves.values())), _LEFT, _RIGHT)
    y_axis = rounded_axis([0.0, 1.0], _BOTTOM, _TOP, num_ticks=5)
    return _curves(title, note, series, hues, x_axis, y_axis, "place in the draft")


def plot_rounds(title: str, note: str, curves: Mapping[str, Sequence[float]], hues: Mapping[str, int]) -> CurvePlot:
    """Counts by round, long calls averaged over neighbouring rounds."""
    series = {name: _thinned(values) for name, values in curves.items()}
    x_axis = axis_of_counts(max(map(len, curves.values())), _LEFT, _RIGHT)
    y_axis = rounded_axis([0.0, 1.0, *(value for values in curves.values() for value in values)], _BOTTOM, _TOP)
    return _curves(title, note, series, hues, x_axis, y_axis, "round")


def plot_thresholds(
    title: str, note: str, curves: Series, references: Mapping[str, float], hues: Mapping[str, int], x_label: str
) -> CurvePlot:
    """Values over a threshold, with lines across for what has none."""
    x_axis = axis_of_values([x for points in curves.values() for x, _ in points], _LEFT, _RIGHT)
    values = [y for points in curves.values() for _, y in points]
    y_axis = rounded_axis([*values, *references.values()], _BOTTOM, _TOP)
    plot = _curves(
        title, note, {name: sorted(points) for name, points in curves.items()}, hues, x_axis, y_axis, x_label
    )
    lines = [(y_axis.place(value), hues[name]) for name, value in references.items()]
    keys = [Key(f"{name}: {short(value)}", hues[name], is_dashed=True) for name, value in references.items()]
    return plot._replace(references=lines, keys=plot.keys + keys)


def _curves(
    title: str, note: str, series: Series, hues: Mapping[str, int], x_axis: Axis, y_axis: Axis, x_label: str
) -> CurvePlot:
    curves = []
    for name, points in series.items():
        places = [Point(x_axis.place(x), y_axis.place(y), f"{name}, {x_label} {x:g}: {short(y)}") for x, y in points]
        curves.append(Curve(hues[name], places, len(places) <= _MAX_DOTS))
    keys = [Key(name, hues[name]) for name in series]
    return CurvePlot(title, note, keys, curves, [], x_axis.ticks(), y_axis.ticks(), x_label)


def _thinned(values: Sequence[float]) -> list[tuple[float, float]]:
    """(round, value) at most _MAX_POINTS times: means of equally many neighbours, at the middle one's place."""
    width = -(-len(values) // _MAX_POINTS)
    pieces = [(start, values[start : start + width]) for start in range(0, len(values), width)]
    return [(start + (len(piece) + 1) / 2, sum(piece) / len(piece)) for start, piece in pieces]
