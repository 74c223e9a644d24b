"""Sections of the report: plots of one question, with a table."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hf_speculate.stats import STAGES
from hf_speculate.tools.bench.report.plots import (
    Bar,
    Plot,
    plot_bars,
    plot_counts,
    plot_dots,
    plot_stacks,
    plot_thresholds,
)
from hf_speculate.tools.bench.report.values import MISSING, Result, fixed, share, spread, text

_SPEEDUP = "Speed-up over plain decoding"
_DRIFT_PLOTS = (  # field, title, note
    ("log_likelihood_per_token", "Log-likelihood per token", "Of the output under the target, in nats."),
    ("agreement_with_greedy", "Agreement with greedy", "Share of tokens that greedy decoding would choose."),
    ("speedup", _SPEEDUP, "On the same prompts."),
)


Columns = Mapping[str, Callable[[Result], str]]  # head -> cell of an entry


class Table(NamedTuple):
    """Rows of text; the first `num_names` columns are words."""

    title: str
    note: str
    head: list[str]
    lines: list[tuple[str, ...]]
    num_names: int


class Section(NamedTuple):
    """Plots of one question, with a table."""

    title: str
    note: str
    plots: list[Plot]
    table: Table | None
    remarks: Sequence[str] = ()


def name_of(method: Result) -> str:
    """Name of a method in the report; those of this library begin with its name."""
    name = str(method["name"])
    return f"hf_speculate, {name}" if method.get("engine") == "ours" else name


def speed(methods: list[Result], remarks: Sequence[str]) -> Section:
    """Speed-ups, with a table of all methods."""
    columns: Columns = {
        "method": name_of,
        "verifier": lambda one: text(one.get("verifier")),
        "output": lambda one: "lossy" if one.get("is_lossy") else "exact",
        "K": lambda one: text(one.get("num_assistant_tokens")),
        "tokens/s": _tokens_per_s,
        "speed-up": lambda one: fixed(one.get("speedup")) + (" (noise)" if one.get("is_noise") else ""),
        "acceptance length": lambda one: fixed(one.get("mean_acceptance_length")),
        "acceptance rate": lambda one: share(one.get("acceptance_rate")),
        "compared with plain": lambda one: text(one.get("checked")),
    }
    note = "Median (minimum to maximum). K: drafted tokens per round, if constant."
    table = _table("All methods", note, columns, methods, 3)
    note = "Median; the thin line goes from minimum to maximum. Dashed bars: lossy verifiers."
    bars = _bars(methods, "speedup")
    return Section("Speed", "", [plot_bars(_SPEEDUP, note, bars)] if bars else [], table, remarks)


def latency(methods: list[Result]) -> Section:
    """Time to the first token, time per token, and peak memory."""
    first, later = _bars(methods, "first_token_s", 1000.0), _bars(methods, "ms_per_token")
    plots = [plot_bars("Time to first token", "Lower is better.", first, " ms", 1)] if first else []
    plots += [plot_bars("Time per token", "Lower is better.", later, " ms")] if later else []
    columns: Columns = {
        "method": name_of,
        "time to first token (ms)": lambda one: fixed(one.get("first_token_s"), 1, 1000.0),
        "ms per token": lambda one: fixed(one.get("ms_per_token")),
        "peak memory (GiB)": lambda one: fixed(one.get("peak_bytes"), factor=2.0**-30),
    }
    names = ("first_token_s", "ms_per_token", "peak_bytes")
    measured = methods if any(one.get(name) is not None for one in methods for name in names) else []
    table = _table("Latency and memory", "Peak memory is measured on CUDA devices.", columns, measured, 1)
    return Section("Latency and memory", "", plots, table)


def rounds(methods: list[Result]) -> Section:
    """Acceptance by position, draft lengths of adaptive schedules, and time by stage."""
    positions, lens, seconds = {}, {}, {}
    for method in methods:
        name, drafted, taken = name_of(method), method.get("draft_lens") or [], method.get("seconds") or {}
        if method.get("acceptance_rate_per_position"):
            positions[name] = method["acceptance_rate_per_position"]
        if method.get("num_assistant_tokens") is None and len(set(drafted)) > 1:
            lens[name] = drafted
        if any(taken.values()):
            seconds[name] = [taken[stage] for stage in STAGES]
    plots: list[Plot] = []
    if positions:
        note = "Accepted tokens over drafted tokens at each position of the draft."
        plots.append(plot_counts("Acceptance rate by position", note, positions, "position in the draft", 5))
    if lens:
        note = "Tokens drafted in each round of one call; 0 is a plain step. Long calls show means over rounds."
        plots.append(plot_counts("Draft length over time", note, lens, "round"))
    if seconds:
        note = "Share of the measured time; score and prefill are the target's forwards."
        plots.append(plot_stacks("Time by stage", note, STAGES, seconds))
    return Section("Inside a round", "", plots, None)


def categories(result: Result, names: Mapping[str, str], methods: Sequence[str]) -> Section:
    """Speed-ups by category of prompts."""
    found: list[Result] = result.get("categories") or []
    columns: Columns = {
        "category": lambda one: text(one.get("category")),
        "method": lambda one: names[one["method"]],
        "speed-up": lambda one: fixed(one.get("speedup")),
        "acceptance rate": lambda one: share(one.get("acceptance_rate")),
        "prompts": lambda one: text(one.get("num_prompts")),
    }
    groups: dict[str, list[tuple[str, float]]] = {}
    for one in found:
        num, value = one.get("num_prompts"), spread(one.get("speedup"))
        of_them = "" if num is None else f" ({num} {'prompt' if num == 1 else 'prompts'})"
        if value is not None:
            groups.setdefault(text(one.get("category")) + of_them, []).append((names[one["method"]], value.middle))
    note = "A marker for each method; the dotted line is plain decoding."
    plots = [plot_dots(_SPEEDUP, note, groups, methods)] if groups else []
    return Section("By category", "", plots, _table("All categories", "", columns, found, 2))


def drift(result: Result) -> Section:
    """Speed of lossy verifiers, and the difference of their output from plain decoding's."""
    found: list[Result] = result.get("drift") or []
    note = (
        "A lossy verifier also accepts drafted tokens that plain decoding would not have chosen. These plots show the "
        "difference of its output for several thresholds; rows without a threshold are plain decoding."
    )
    label = (result.get("settings") or {}).get("drift_num_assistant_tokens")
    if label is not None:
        note = f"{note} Draft length: {text(label)}."
    columns: Columns = {
        "verifier": lambda one: text(one.get("verifier")),
        "threshold": lambda one: text(one.get("posterior_threshold")),
        "tokens/s": lambda one: fixed(one.get("tokens_per_s"), 0),
        "speed-up": lambda one: fixed(one.get("speedup")),
        "log-likelihood per token": lambda one: fixed(one.get("log_likelihood_per_token"), 3),
        "agreement with greedy": lambda one: share(one.get("agreement_with_greedy")),
        "tokens": lambda one: text(one.get("num_tokens")),
    }
    table = _table("All thresholds", "", columns, found, 1)
    return Section("Drift of lossy verifiers", note if found else "", _drift_plots(found), table)


def drift_names(result: Result) -> list[str]:
    """Names of the series of the drift plots."""
    return list(dict.fromkeys(row["verifier"] for row in result.get("drift") or ()))


def _drift_plots(found: list[Result]) -> list[Plot]:
    plots = []
    for field, title, note in _DRIFT_PLOTS:
        curves: dict[str, list[tuple[float, float]]] = {}
        references: dict[str, float] = {}
        for row in found:
            name, threshold, value = row["verifier"], row.get("posterior_threshold"), spread(row.get(field))
            if value is not None and threshold is not None:
                curves.setdefault(name, []).append((threshold, value.middle))
            elif value is not None:
                references[name] = value.middle
        if curves:
            plots.append(plot_thresholds(title, note, curves, references, "posterior_threshold"))
    return plots


def _bars(methods: list[Result], field: str, factor: float = 1.0) -> list[Bar]:
    """Bars of the methods that have a value."""
    found = []
    for method in methods:
        value, name, is_lossy = spread(method.get(field), factor), name_of(method), bool(method.get("is_lossy"))
        if value is not None:
            found.append(Bar(f"{name}, lossy" if is_lossy else name, name, value, is_lossy))
    return found


def _tokens_per_s(method: Result) -> str:
    value = spread(method.get("tokens_per_s"))
    return MISSING if value is None else value.text(1 if value.low < 10 else 0)


def _table(title: str, note: str, columns: Columns, entries: list[Result], num_names: int) -> Table | None:
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
