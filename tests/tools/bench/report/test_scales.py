"""Axes hold every value, and name round numbers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_speculate.tools.bench.report.scales import axis_of_counts, axis_of_values, rounded_axis

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6)


@given(NUMBERS)
def test_a_rounded_axis_holds_every_value_in_order(values: list[float]) -> None:
    axis = rounded_axis(values, 0.0, 100.0)
    rounding = 1e-6 * (axis.high - axis.low)
    assert axis.low <= min(values) + rounding
    assert axis.high >= max(values) - rounding
    places = [axis.place(value) for value in sorted(values)]
    assert places == sorted(places)
    assert 0 <= places[0] <= places[-1] <= 100
    ticks = [tick.place for tick in axis.ticks()]
    assert (ticks[0], ticks[-1]) == (0.0, 100.0)
    assert 2 <= len(ticks) <= 7
    gaps = [after - before for before, after in pairwise(ticks)]
    assert max(gaps) - min(gaps) < 0.05
    assert len({tick.label for tick in axis.ticks()}) == len(ticks)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 1.0], ["0.0", "0.5", "1.0"]),
        ([0.0, 2.56], ["0", "1", "2", "3"]),
        ([-1.6, -0.92], ["-1.6", "-1.4", "-1.2", "-1.0", "-0.8"]),
        ([0.97, 0.99], ["0.970", "0.975", "0.980", "0.985", "0.990"]),
        ([3.0], ["2.6", "2.8", "3.0", "3.2", "3.4"]),
        ([0.0, 0.0], ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        ([0.0, 1500.0], ["0", "500", "1000", "1500"]),
    ],
)
def test_labels_are_round(values: list[float], labels: list[str]) -> None:
    assert [tick.label for tick in rounded_axis(values, 0.0, 100.0).ticks()] == labels


@pytest.mark.parametrize(
    ("highest", "labels"),
    [
        (1, ["1"]),
        (5, ["1", "2", "3", "4", "5"]),
        (12, ["1", "2", "4", "6", "8", "10", "12"]),
        (700, ["1", "200", "400", "600"]),
    ],
)
def test_counts_are_whole(highest: int, labels: list[str]) -> None:
    assert [tick.label for tick in axis_of_counts(highest, 0.0, 100.0).ticks()] == labels


def test_values_far_apart_lie_on_a_logarithmic_axis() -> None:
    far, near = axis_of_values([0.5, 0.005, 0.05], 0.0, 100.0), axis_of_values([0.1, 0.2, 0.3], 0.0, 100.0)
    assert [(tick.place, tick.label) for tick in far.ticks()] == [(0.0, "0.005"), (50.0, "0.05"), (100.0, "0.5")]
    assert [tick.place for tick in near.ticks()] == [0.0, 50.0, 100.0]
    assert not near.is_log


def test_names_that_would_stand_on_others_are_left_out() -> None:
    axis = axis_of_values([0.1, 0.101, 0.2, 0.3], 0.0, 100.0)
    assert [tick.label for tick in axis.ticks()] == ["0.1", "0.2", "0.3"]


def test_a_single_value_lies_in_the_middle() -> None:
    assert [(tick.place, tick.label) for tick in axis_of_values([0.09], 0.0, 100.0).ticks()] == [(50.0, "0.09")]
