"""Writes values of a result as text; each may be missing."""

from collections.abc import Mapping
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
        low, middle, high = (f"{value:,.{decimals}f}" for value in (self.low, self.middle, self.high))
        return f"{middle}{unit}" if self.low == self.high else f"{middle}{unit} ({low} to {high})"


def spread(value: Any, factor: float = 1.0) -> Spread | None:
    """Minimum, median and maximum, or one number three times; None where there is no value."""
    if value is None:
        return None
    low, middle, high = (
        (value[name] for name in ("min", "median", "max")) if isinstance(value, Mapping) else [value] * 3
    )
    return Spread(factor * low, factor * middle, factor * high)


def short(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".removesuffix(".")


def share(value: float | None) -> str:
    """A share of one in percent."""
    return MISSING if value is None else f"{100 * value:.1f} %"


def fixed(value: Any, decimals: int = 2, factor: float = 1.0) -> str:
    """A number, or the median of a spread with minimum and maximum, with a fixed number of decimals."""
    read = spread(value, factor)
    return MISSING if read is None else read.text(decimals)


def text(value: Any) -> str:
    """Any plain value in a line."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text(inner)}" for name, inner in value.items()) or MISSING
    if isinstance(value, list | tuple):
        return ", ".join(map(text, value)) or MISSING
    return str(value)
