"""Compute values, axes and labels of the report's plots, which `page.html` draws.

Horizontal positions are percentages of the plot's width, so that a plot fills a screen of any size
while its text keeps its size. Vertical positions are in pixels.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hf_speculate.tools.bench.report.values import TIMES, Result, Spread, spread, text

_STEPS = (1, 2, 5, 10)  # steps of an axis, times a power of ten


class Axis(NamedTuple):
    """A map from values to positions, with `low` at `start` and `high` at `end`."""

    low: float
    high: float
    start: float
    end: float
    labels: tuple[tuple[float, str], ...]  # values and their labels, ascending
    is_log: bool = False

    def position(self, value: float) -> float:
        """Return the position of a value, clamped to the axis and rounded to hundredths."""
        low, high, value = (math.log(x) if self.is_log else x for x in (self.low, self.high, value))
        fraction = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(max(fraction, 0.0), 1.0) * (self.end - self.start), 2)

    def ticks(self, unit: str = "") -> list[tuple[float, str]]:
        """Return positions and labels."""
        return [(self.position(value), label + unit) for value, label in self.labels]


def rounded_axis(values: Sequence[float], start: float, end: float, num_ticks: int = 4) -> Axis:
    """Make an axis that contains all values and has round numbers at both ends."""
    low, high = min(values), max(values)
    # leave a margin on both sides of a single value
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):
        margin = abs(low) / 10 if abs(low) > 1e-9 else 1.0
        low, high = low - margin, high + margin
    step = _step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    labels = tuple(
        (index * step, f"{index * step:.{decimals}f}") for index in range(first, last + 1)
    )
    return Axis(first * step, last * step, start, end, labels)


def axis_of_counts(highest: int, start: float, end: float) -> Axis:
    """Make an axis from 1 to `highest` with whole numbers as labels."""
    max_labels = min(10, 20 // len(str(highest)))  # labels that fit side by side on a phone
    step = max(1, round(_step(highest / max_labels)))
    counts = (1, *(count for count in range(step, highest + 1, step) if count > 1))
    return Axis(
        1.0, float(highest), start, end, tuple((float(count), str(count)) for count in counts)
    )


def axis_of_values(values: Sequence[float], start: float, end: float) -> Axis:
    """Make an axis whose labels are the values, as far as they fit.

    The axis is logarithmic if the values span a factor of ten.
    """
    ordered = sorted(set(values))
    is_log = ordered[0] > 0 and ordered[-1] >= 10 * ordered[0]
    axis = Axis(ordered[0], ordered[-1], start, end, (), is_log)
    labelled: list[float] = []
    for value in ordered:
        if not labelled or axis.position(value) - axis.position(labelled[-1]) >= (end - start) / 9:
            labelled.append(value)
    return axis._replace(labels=tuple((value, f"{value:g}") for value in labelled))


def _step(min_step: float) -> float:
    """Return the smallest round step of at least `min_step`, with a tolerance for rounding."""
    power = 10.0 ** math.floor(math.log10(min_step))
    return next(power * factor for factor in _STEPS if power * factor >= min_step * (1 - 1e-9))


_LABEL_HEIGHT = 18.0  # height of a label next to a curve, in pixels
_MAX_POINTS = 160  # maximum number of points in a curve; longer curves are averaged
_LEFT, _RIGHT = 13.0, 95.0  # edges of a plot with numbers on its vertical axis
_TOP, _BOTTOM = 8.0, 172.0
_PLAIN = 1.0  # speed-up of plain decoding
_PERCENT = Axis(
    0.0, 100.0, 0.0, 100.0, tuple((float(value), str(value)) for value in range(0, 101, 25))
)


class Key(NamedTuple):
    """The label of a series.

    It is drawn next to the end of its curve, at `top` pixels, or in a legend.
    """

    name: str
    is_dashed: bool = False
    top: float = 0.0


class Bar(NamedTuple):
    method: str
    value: Spread
    is_lossy: bool  # whether it is drawn as an outline


class Plot(NamedTuple):
    """Values of one plot with their axes.

    `page.html` leaves out plots without values.
    """

    shape: str  # "bars", "stacks", "dots" or "curves"
    # `Bar`s for bars; seconds of each part by name for stacks; (method, value) by group for dots;
    # (x, y) by method for curves
    values: Any
    x: Axis
    y: Axis | None = None
    unit: str = ""
    decimals: int = 2
    keys: Sequence[Key] = ()
    x_label: str = ""
    references: Mapping[str, float] = {}  # method -> value of a horizontal line
    parts: Sequence[str] = ()


Points = Mapping[str, Sequence[tuple[float, float]]]  # name -> (x, y)


def plot_bars(bars: Sequence[Bar], unit: str = TIMES, decimals: int = 2) -> Plot:
    """Plot bars from 0; for speed-ups, the axis includes plain decoding."""
    known = [0.0, *([_PLAIN] if unit == TIMES else []), *(bar.value.high for bar in bars)]
    return Plot("bars", bars, rounded_axis(known, 0.0, 100.0), unit=unit, decimals=decimals)


def plot_stacks(parts: Sequence[str], seconds: Mapping[str, Sequence[float]]) -> Plot:
    return Plot("stacks", seconds, _PERCENT, unit=" %", parts=parts)


def plot_dots(categories: Sequence[Result], methods: Sequence[str]) -> Plot:
    """Plot speed-ups by category of prompts, without categories whose speed is unknown."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for entry in categories:
        num_prompts, value = entry.get("num_prompts"), spread(entry.get("speedup"))
        size = (
            ""
            if num_prompts is None
            else f" ({num_prompts} {'prompt' if num_prompts == 1 else 'prompts'})"
        )
        if value is not None:
            groups.setdefault(text(entry.get("category")) + size, []).append(
                (entry["method"], value.middle)
            )
    dots = [dot for group in groups.values() for dot in group]
    used = {method for method, _ in dots}
    axis = rounded_axis([_PLAIN, *(value for _, value in dots)], 6.0, 94.0)
    return Plot(
        "dots", groups, axis, unit=TIMES, keys=[Key(name) for name in methods if name in used]
    )


def plot_counts(curves: Mapping[str, Sequence[float]], x_label: str, num_ticks: int = 4) -> Plot:
    """Plot values by position or round, counted from 1; long curves are averaged."""
    points = {name: _thinned(values) for name, values in curves.items()}
    x = axis_of_counts(max(map(len, curves.values()), default=1), _LEFT, _RIGHT)
    known = [0.0, 1.0, *(value for values in curves.values() for value in values)]
    return _curves(points, x, rounded_axis(known, _BOTTOM, _TOP, num_ticks), x_label, {})


def plot_thresholds(entries: Sequence[Result], field: str) -> Plot:
    """Plot values over each verifier's threshold, or a horizontal line if it has none."""
    curves: dict[str, list[tuple[float, float]]] = {}
    references: dict[str, float] = {}
    for entry in entries:
        threshold, value = entry.get("posterior_threshold"), spread(entry.get(field))
        if value is not None and threshold is not None:
            curves.setdefault(entry["verifier"], []).append((threshold, value.middle))
        elif value is not None:
            references[entry["verifier"]] = value.middle
    points = {name: sorted(pairs) for name, pairs in curves.items()}
    known = [pair for pairs in points.values() for pair in pairs] or [(0.0, 0.0)]
    x = axis_of_values([x for x, _ in known], _LEFT, _RIGHT)
    y = rounded_axis([*(y for _, y in known), *references.values()], _BOTTOM, _TOP)
    return _curves(points, x, y, "posterior_threshold", references)


def _curves(
    points: Points, x: Axis, y: Axis, x_label: str, references: Mapping[str, float]
) -> Plot:
    keys = [Key(name, top=y.position(pairs[-1][1])) for name, pairs in points.items()]
    keys += [Key(name, is_dashed=True, top=y.position(value)) for name, value in references.items()]
    return Plot("curves", points, x, y, keys=_apart(keys), x_label=x_label, references=references)


def _apart(keys: Sequence[Key]) -> list[Key]:
    """Move overlapping labels down, then labels below the plot back up."""
    ordered = sorted(keys, key=lambda key: key.top)
    tops: list[float] = []
    for key in ordered:
        tops.append(max(key.top, tops[-1] + _LABEL_HEIGHT) if tops else key.top)
    for index in reversed(range(len(tops))):
        max_top = _BOTTOM if index == len(tops) - 1 else tops[index + 1] - _LABEL_HEIGHT
        tops[index] = max(min(tops[index], max_top), _TOP + index * _LABEL_HEIGHT)
    return [key._replace(top=round(top, 2)) for key, top in zip(ordered, tops, strict=True)]


def _thinned(values: Sequence[float]) -> list[tuple[float, float]]:
    """Average groups of neighbours, to at most _MAX_POINTS points.

    Returns:
        Pairs of (round, value), in which the round is the middle of the group.
    """
    width = -(-len(values) // _MAX_POINTS)
    pieces = [(start, values[start : start + width]) for start in range(0, len(values), width)]
    return [(start + (len(piece) + 1) / 2, sum(piece) / len(piece)) for start, piece in pieces]
