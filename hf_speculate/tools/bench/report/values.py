"""Writes values of a result, each of which may be missing, as text and in tables."""

from collections.abc import Callable, Mapping, Sequence
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


Columns = dict[str, Callable[[Result], str]]  # head -> cell of an entry


class Table(NamedTuple):
    """Rows of text; the first `num_names` columns are words."""

    title: str
    note: str
    head: list[str]
    lines: list[tuple[str, ...]]
    num_names: int


def name_of(method: Result) -> str:
    """Name of a method in the report; those of this library begin with its name."""
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


def make_table(title: str, note: str, columns: Columns, entries: Sequence[Result], num_names: int) -> Table | None:
    """A table without columns that are the same in all of several lines; the note has their value."""
    if not entries:
        return None
    cells = {head: [cell(entry) for entry in entries] for head, cell in columns.items()}
    constant = [head for head, column in cells.items() if len(entries) > 1 and len(set(column)) == 1]
    same = [f"{head}: {cells[head][0]}" for head in constant if cells[head][0] != MISSING]
    note = " ".join(filter(None, [note, f"The same for all: {'; '.join(same)}." if same else ""]))
    num_names -= len(set(constant) & set(list(columns)[:num_names]))
    kept = {head: column for head, column in cells.items() if head not in constant}
    return Table(title, note, list(kept), list(zip(*kept.values(), strict=True)), num_names)
