"""What is drawn lies where the figures say."""

import pytest

from hf_speculate.tools.bench.report.plots import (
    Style,
    plot_bars,
    plot_dots,
    plot_positions,
    plot_rounds,
    plot_stacks,
    plot_thresholds,
)
from hf_speculate.tools.bench.report.values import Spread


def test_bars_are_as_long_as_their_values() -> None:
    plot = plot_bars(
        "", "", [("a", Spread(1.0, 2.0, 4.0), Style.of(0), False), ("b", Spread(0.5, 0.5, 0.5), Style.of(1), True)]
    )
    first, second = plot.bars
    assert (first.end, first.low, first.high) == (50.0, 25.0, 100.0)
    assert (second.end, second.is_open, second.value) == (12.5, True, "0.50\u00d7")
    assert plot.reference == 25.0
    assert [tick.label for tick in plot.ticks] == ["0\u00d7", "1\u00d7", "2\u00d7", "3\u00d7", "4\u00d7"]


def test_a_stack_is_filled_by_its_parts() -> None:
    plot = plot_stacks("", "", ("draft", "score", "verify"), {"a": [1.0, 2.0, 1.0], "b": [0.0, 0.3, 0.0]})
    assert [(part.start, part.width) for part in plot.stacks[0].parts] == [(0.0, 25.0), (25.0, 50.0), (75.0, 25.0)]
    assert [part.width for part in plot.stacks[1].parts] == [0.0, 100.0, 0.0]
    assert [stack.value for stack in plot.stacks] == ["4.00 s", "0.300 s"]
    assert plot.stacks[0].parts[1].label == "score: 2.00 s, 50.0 %"


def test_a_colour_stands_for_one_method() -> None:
    styles = {name: Style.of(index) for index, name in enumerate("abc")}
    dots = plot_dots("", "", {"code": [("a", 1.5), ("c", 0.5)], "prose": [("c", 1.0)]}, styles)
    assert [(key.name, key.style.hue) for key in dots.keys] == [("a", 0), ("c", 2)]
    assert [dot.style.hue for row in dots.rows for dot in row.dots] == [0, 2, 2]
    assert dots.rows[1].dots[0].place == dots.reference
    curves = plot_positions("", "", {"c": [0.5, 0.25]}, styles)
    assert [key.style.hue for key in curves.keys] == [curve.style.hue for curve in curves.curves] == [2]


def test_a_share_lies_between_bottom_and_top() -> None:
    plot = plot_positions("", "", {"a": [1.0, 0.5, 0.0]}, {"a": Style.of(0)})
    heights = [point.y for point in plot.curves[0].points]
    low, high = plot.y_ticks[0].place, plot.y_ticks[-1].place
    assert heights == [high, (low + high) / 2, low]
    assert [point.x for point in plot.curves[0].points] == [tick.place for tick in plot.x_ticks]


@pytest.mark.parametrize("num_rounds", [1, 7, 160, 161, 1000])
def test_long_calls_are_averaged(num_rounds: int) -> None:
    lens = [float(index % 4) for index in range(num_rounds)]
    plot = plot_rounds("", "", {"a": lens}, {"a": Style.of(0)})
    points = plot.curves[0].points
    assert len(points) == -(-num_rounds // -(-num_rounds // 160))
    low, high, top = plot.y_ticks[0].place, plot.y_ticks[-1].place, float(plot.y_ticks[-1].label)
    if num_rounds == 1000:  # seven rounds each but the last
        values = [(low - point.y) / (low - high) * top for point in points]
        assert values[0] == pytest.approx(sum(lens[:7]) / 7, abs=1e-2)
        assert values[-1] == pytest.approx(sum(lens[994:]) / 6, abs=1e-2)


def test_thresholds_are_joined_in_order_beside_what_has_none() -> None:
    curves = {"typical": [(0.5, -1.0), (0.005, -2.0), (0.05, -1.5)]}
    styles = {"typical": Style.of(0), "plain greedy": Style.of(1)}
    plot = plot_thresholds("", "", curves, {"plain greedy": -1.0}, styles, "posterior_threshold")
    points = plot.curves[0].points
    assert [point.x for point in points] == [13.0, 54.0, 95.0]
    assert [point.y for point in points] == sorted((point.y for point in points), reverse=True)
    assert plot.references == [(points[-1].y, Style.of(1))]
    assert [(key.name, key.is_dashed) for key in plot.keys] == [("typical", False), ("plain greedy", True)]
