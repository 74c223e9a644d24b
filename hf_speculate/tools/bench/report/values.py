"""Format the values of a result as text and tables; any value may be missing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Result = Mapping[str, Any]
MISSING = "-"
TIMES = "\u00d7"  # the multiplication sign


class Spread(NamedTuple):
    low: float
    middle: float  # the median
    high: float

    def text(self, decimals: int, unit: str = "") -> str:
        """Format the median, and the minimum and maximum if they differ."""
        low, middle, high = (f"{value:,.{decimals}f}" for value in self)
        return f"{middle}{unit}" if self.low == self.high else f"{middle}{unit} ({low} to {high})"


def spread(value: Any, factor: float = 1.0) -> Spread | None:
    """Read minimum, median and maximum, or use one number for all three; None if missing."""
    if value is None:
        return None
    numbers = (
        [value[name] for name in ("min", "median", "max")]
        if isinstance(value, Mapping)
        else [value] * 3
    )
    return Spread(*(factor * number for number in numbers))


def short(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".removesuffix(".")


def text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        value = [f"{name} {text(inner)}" for name, inner in value.items()]
    if isinstance(value, list | tuple):
        value = ", ".join(map(text, value))
    return MISSING if value is None or value == "" else str(value)


def field(
    name: str, decimals: int | None = None, factor: float = 1.0, unit: str = ""
) -> Callable[[Result], str]:
    """Make a formatter for a field of an entry.

    Args:
        name: name of the field.
        decimals: number of decimals, for a number or a spread of numbers.
            None formats any value as text.
        factor: factor on the numbers.
        unit: unit after the number.
    """

    def format_field(entry: Result) -> str:
        if decimals is None:
            return text(entry.get(name))
        numbers = spread(entry.get(name), factor)
        return MISSING if numbers is None else numbers.text(decimals, unit)

    return format_field


def share(name: str) -> Callable[[Result], str]:
    """Make a formatter for a field in [0, 1] of an entry, in percent."""
    return field(name, 1, 100.0, " %")


Columns = dict[str, Callable[[Result], str]]  # header -> formatter of the column's cells


class Table(NamedTuple):
    """Rows of text.

    The first `num_names` columns contain words, the others numbers.
    """

    title: str
    note: str
    head: list[str]
    lines: list[tuple[str, ...]]
    num_names: int


def name_of(method: Result) -> str:
    """Return a method's name in the report; methods of this library begin with "hf_speculate"."""
    name = str(method["name"])
    return f"hf_speculate, {name}" if method.get("engine") == "ours" else name


def tokens_per_s(entry: Result) -> str:
    value = spread(entry.get("tokens_per_s"))
    return MISSING if value is None else value.text(1 if value.low < 10 else 0)


_speedup = field("speedup", 2)
METHODS: Columns = {
    "method": name_of,
    "verifier": field("verifier"),
    "output": lambda entry: "lossy" if entry.get("is_lossy") else "exact",
    "K": field("num_assistant_tokens"),
    "tokens/s": tokens_per_s,
    "speed-up": lambda entry: _speedup(entry) + (" (noise)" if entry.get("is_noise") else ""),
    "acceptance length": field("mean_acceptance_length", 2),
    "acceptance rate": share("acceptance_rate"),
    "compared with plain": field("checked"),
}
LATENCIES: Columns = {
    "method": name_of,
    "time to first token (ms)": field("first_token_s", 1, 1000.0),
    "ms per token": field("ms_per_token", 2),
    "peak memory (GiB)": field("peak_bytes", 2, 2.0**-30),
}
CATEGORIES: Columns = {
    "category": field("category"),
    "method": field("method"),
    "speed-up": _speedup,
    "acceptance rate": share("acceptance_rate"),
    "prompts": field("num_prompts"),
}
DRIFT: Columns = {
    "verifier": field("verifier"),
    "threshold": field("posterior_threshold"),
    "tokens/s": tokens_per_s,
    "speed-up": _speedup,
    "log-likelihood per token": field("log_likelihood_per_token", 3),
    "agreement with greedy": share("agreement_with_greedy"),
    "tokens": field("num_tokens"),
}


def make_table(
    title: str, note: str, columns: Columns, entries: Sequence[Result], num_names: int
) -> Table | None:
    """Make a table; columns whose cells are all equal move into the note."""
    if not entries:
        return None
    cells = {head: [cell(entry) for entry in entries] for head, cell in columns.items()}
    constant = [
        head for head, column in cells.items() if len(entries) > 1 and len(set(column)) == 1
    ]
    constant_cells = [f"{head}: {cells[head][0]}" for head in constant if cells[head][0] != MISSING]
    note = " ".join(
        filter(
            None,
            [note, f"The same for all: {'; '.join(constant_cells)}." if constant_cells else ""],
        )
    )
    num_names -= len(set(constant) & set(list(columns)[:num_names]))
    varying = {head: column for head, column in cells.items() if head not in constant}
    return Table(title, note, list(varying), list(zip(*varying.values(), strict=True)), num_names)
