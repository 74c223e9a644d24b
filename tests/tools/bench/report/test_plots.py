"""What is drawn lies where the figures say."""

import pytest

from hf_speculate.tools.bench.report.plots import (
    Bar,
    plot_bars,
    plot_dots,
    plot_positions,
    plot_rounds,
    plot_thresholds,
)
from hf_speculate.tools.bench.report.values import Spread


def test_bars_begin_at_zero_and_leave_room_for_plain_decoding() -> None:
    plot = plot_bars("", "", [Bar("a", "a", Spread(1.0, 2.0, 4.0), False), Bar("b", "b", Spread(0.5, 0.5, 0.5), True)])
    assert [plot.x.place(value) for value in (0.0, 0.5, 1.0, 2.0, 4.0)] == [0.0, 12.5, 25.0, 50.0, 100.0]
    assert [tick.label for tick in plot.x.ticks(plot.unit)] == ["0\u00d7", "1\u00d7", "2\u00d7", "3\u00d7", "4\u00d7"]


def test_a_legend_names_the_methods_that_are_drawn() -> None:
    plot = plot_dots("", "", {"code": [("a", 1.5), ("c", 0.5)], "prose": [("c", 1.0)]}, ["a", "b", "c"])
    assert [key.name for key in plot.keys] == ["a", "c"]


def test_a_share_lies_between_bottom_and_top() -> None:
    plot = plot_positions("", "", {"a": [1.0, 0.5, 0.0]})
    ticks = [tick.place for tick in plot.y.ticks()]
    assert [plot.y.place(y) for _, y in plot.values["a"]] == [ticks[-1], (ticks[0] + ticks[-1]) / 2, ticks[0]]
    assert [plot.x.place(x) for x, _ in plot.values["a"]] == [tick.place for tick in plot.x.ticks()]


@pytest.mark.parametrize("num_rounds", [1, 7, 160, 161, 1000])
def test_long_calls_are_averaged(num_rounds: int) -> None:
    lens = [float(index % 4) for index in range(num_rounds)]
    values = [value for _, value in plot_rounds("", "", {"a": lens}).values["a"]]
    assert len(values) == -(-num_rounds // -(-num_rounds // 160))
    if num_rounds == 1000:  # seven rounds each but the last
        assert (values[0], values[-1]) == (sum(lens[:7]) / 7, sum(lens[994:]) / 6)


def test_thresholds_are_joined_in_order_beside_what_has_none() -> None:
    curves = {"typical": [(0.5, -1.0), (0.005, -2.0), (0.05, -1.5)]}
    plot = plot_thresholds("", "", curves, {"plain greedy": -1.0}, "posterior_threshold")
    points = plot.values["typical"]
    assert [plot.x.place(x) for x, _ in points] == [13.0, 54.0, 95.0]
    assert points == sorted(curves["typical"])
    assert [(key.name, key.is_dashed) for key in plot.keys] == [("typical", False), ("plain greedy", True)]
