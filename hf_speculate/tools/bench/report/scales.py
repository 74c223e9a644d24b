"""Places numbers on axes."""

import math
from collections.abc import Sequence
from typing import NamedTuple

_STEPS = (1, 2, 5, 10)  # what an axis counts in, times a power of ten


class Tick(NamedTuple):
    place: float  # where, in the axis' own unit
    label: str


class Axis(NamedTuple):
    """Numbers from `low` to `high`, laid over places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    labels: tuple[tuple[float, str], ...]  # numbers that are named, in order
    is_log: bool = False

    def place(self, value: float) -> float:
        """Where a number lies, to the hundredth; one outside lies at the nearer end."""
        low, high, value = (math.log(x) if self.is_log else x for x in (self.low, self.high, value))
        part = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(max(part, 0.0), 1.0) * (self.end - self.start), 2)

    def ticks(self, unit: str = "") -> list[Tick]:
        return [Tick(self.place(value), label + unit) for value, label in self.labels]


def rounded_axis(values: Sequence[float], start: float, end: float, num_ticks: int = 4) -> Axis:
    """An axis that ends at round numbers on both sides of all values."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):  # one value: room on both sides
        room = abs(low) / 10 if abs(low) > 1e-9 else 1.0
        low, high = low - room, high + room
    step = _step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    labels = tuple((index * step, f"{index * step:.{decimals}f}") for index in range(first, last + 1))
    return Axis(first * step, last * step, start, end, labels)


def axis_of_counts(highest: int, start: float, end: float) -> Axis:
    """An axis from 1 to the number of places; it names whole numbers only."""
    room = min(10, 20 // len(str(highest)))  # labels that stand beside one another on a phone
    step = max(1, round(_step(highest / room)))
    counts = (1, *(count for count in range(step, highest + 1, step) if count > 1))
    return Axis(1.0, float(highest), start, end, tuple((float(count), str(count)) for count in counts))


def axis_of_values(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis that names the values themselves, logarithmic where they span a factor of ten.

    Names that would stand on others are left out.
    """
    ordered = sorted(set(values))
    is_log = ordered[0] > 0 and ordered[-1] >= 10 * ordered[0]
    axis = Axis(ordered[0], ordered[-1], start, end, (), is_log)
    named: list[float] = []
    for value in ordered:
        if not named or axis.place(value) - axis.place(named[-1]) >= (end - start) / 9:
            named.append(value)
    return axis._replace(labels=tuple((value, f"{value:g}") for value in named))


def _step(least: float) -> float:
    """The smallest round step from `least` on, but for rounding."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in _STEPS if power * factor >= least * (1 - 1e-9))
