"""Writes values of a result as text; each may be missing."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Result = Mapping[str, Any]
MISSING = "-"
TIMES = "\u00d7"  # the sign of multiplication


class Spread(NamedTuple):
    low: float
    middle: float  # the median
    high: float

    def text(self, decimals: int, unit: str = "") -> str:
        """The median, with minimum and maximum if they differ."""
        low, middle, high = (f"{value:,.{decimals}f}" for value in self)
        return f"{middle}{unit}" if self.low == self.high else f"{middle}{unit} ({low} to {high})"


def spread(value: Any, factor: float = 1.0) -> Spread | None:
    """Minimum, median and maximum, or one number three times; None where there is no value."""
    if value is None:
        return None
    numbers = [value[name] for name in ("min", "median", "max")] if isinstance(value, Mapping) else [value] * 3
    return Spread(*(factor * number for number in numbers))


def short(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".removesuffix(".")


def text(value: Any) -> str:
    """Any plain value in a line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        value = [f"{name} {text(inner)}" for name, inner in value.items()]
    if isinstance(value, list | tuple):
        value = ", ".join(map(text, value))
    return MISSING if value is None or value == "" else str(value)


def field(name: str, decimals: int | None = None, factor: float = 1.0, unit: str = "") -> Callable[[Result], str]:
    """A function that shows an entry's field: any value as text, or with `decimals` a number or a spread of numbers."""

    def shown(entry: Result) -> str:
        if decimals is None:
            return text(entry.get(name))
        read = spread(entry.get(name), factor)
        return MISSING if read is None else read.text(decimals, unit)

    return shown


def share(name: str) -> Callable[[Result], str]:
    """A function that shows an entry's field, a share of one, in percent."""
    return field(name, 1, 100.0, " %")
