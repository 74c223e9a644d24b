"""Reads values out of a result, where any of them may be missing, and writes them as text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Result = Mapping[str, Any]
MISSING = "-"
TIMES = "\u00d7"  # the sign of multiplication


class Spread(NamedTuple):
    """Result of several runs."""

    low: float
    middle: float  # the median
    high: float

    def text(self, decimals: int, unit: str = "") -> str:
        """The median, with minimum and maximum if they differ."""
        low, middle, high = (f"{value:,.{decimals}f}" for value in (self.low, self.middle, self.high))
        return f"{middle}{unit}" if self.low == self.high else f"{middle}{unit} ({low} to {high})"


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def numbers(value: Any) -> list[float]:
    """The finite numbers of a list, up to the first entry that is none."""
    found = []
    for entry in value if isinstance(value, Sequence) and not isinstance(value, str) else ():
        read = number(entry)
        if read is None:
            break
        found.append(read)
    return found


def spread(value: Any, factor: float = 1.0) -> Spread | None:
    """Minimum, median and maximum, or one number three times; None where the median is missing."""
    given = value if isinstance(value, Mapping) else {"median": value}
    middle = number(given.get("median"))
    if middle is None:
        return None
    low, high = number(given.get("min")), number(given.get("max"))
    return Spread(*(factor * (middle if one is None else one) for one in (low, middle, high)))


def rows(result: Result, name: str) -> list[Result]:
    """The entries of one of the result's tables; none where there is no such table."""
    table = result.get(name)
    return [row for row in table if isinstance(row, Mapping)] if isinstance(table, Sequence) else []


def short(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".removesuffix(".")


def share(value: Any) -> str:
    """A share of one in percent."""
    read = number(value)
    return MISSING if read is None else f"{100 * read:.1f} %"


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
