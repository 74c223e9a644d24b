"""Sections of the report: plots of one question, with a table."""

from collections.abc import Sequence
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
from hf_speculate.tools.bench.report.tables import CATEGORIES, DRIFT, LATENCIES, METHODS, Table, make_table, name_of
from hf_speculate.tools.bench.report.values import TIMES, Result, spread, text

_SPEEDUP = "Speed-up over plain decoding"
_DRIFT_PLOTS = (  # field, title, note
    ("log_likelihood_per_token", "Log-likelihood per token", "Of the output under the target, in nats."),
    ("agreement_with_greedy", "Agreement with greedy", "Share of tokens that greedy decoding would choose."),
    ("speedup", _SPEEDUP, "On the same prompts."),
)


class Section(NamedTuple):
    title: str
    plots: list[Plot]
    table: Table | None = None
    note: str = ""
    remarks: Sequence[str] = ()


def speed(methods: list[Result], remarks: Sequence[str]) -> Section:
    """Speed-ups, with a table of all methods."""
    note = "Median (minimum to maximum). K: drafted tokens per round, if constant."
    table = make_table("All methods", note, METHODS, methods, 3)
    note = "Median; the thin line goes from minimum to maximum. Dashed bars: lossy verifiers."
    return Section("Speed", _bars(_SPEEDUP, note, methods, "speedup", TIMES), table, remarks=remarks)


def latency(methods: list[Result]) -> Section:
    """Time to the first token, time per token, and peak memory."""
    note = "Lower is better."
    plots = _bars("Time to first token", note, methods, "first_token_s", " ms", 1, 1000.0)
    plots += _bars("Time per token", note, methods, "ms_per_token", " ms")
    measured = methods if plots or any(one.get("peak_bytes") is not None for one in methods) else []
    title, note = "Latency and memory", "Peak memory is measured on CUDA devices."
    return Section(title, plots, make_table(title, note, LATENCIES, measured, 1))


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
    return Section("Inside a round", plots)


def categories(result: Result, methods: list[Result]) -> Section:
    """Speed-ups by category of prompts."""
    names = {method["name"]: name_of(method) for method in methods}
    found = [{**one, "method": names[one["method"]]} for one in result.get("categories") or []]
    groups: dict[str, list[tuple[str, float]]] = {}
    for one in found:
        num, value = one.get("num_prompts"), spread(one.get("speedup"))
        of_them = "" if num is None else f" ({num} {'prompt' if num == 1 else 'prompts'})"
        if value is not None:
            groups.setdefault(text(one.get("category")) + of_them, []).append((one["method"], value.middle))
    note = "A marker for each method; the dotted line is plain decoding."
    plots = [plot_dots(_SPEEDUP, note, groups, list(names.values()))] if groups else []
    return Section("By category", plots, make_table("All categories", "", CATEGORIES, found, 2))


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
    plots = []
    for field, title, caption in _DRIFT_PLOTS:
        curves: dict[str, list[tuple[float, float]]] = {}
        references: dict[str, float] = {}
        for row in found:
            name, threshold, value = row["verifier"], row.get("posterior_threshold"), spread(row.get(field))
            if value is not None and threshold is not None:
                curves.setdefault(name, []).append((threshold, value.middle))
            elif value is not None:
                references[name] = value.middle
        if curves:
            plots.append(plot_thresholds(title, caption, curves, references, "posterior_threshold"))
    return Section("Drift of lossy verifiers", plots, make_table("All thresholds", "", DRIFT, found, 1), note)


def _bars(
    title: str, note: str, methods: list[Result], field: str, unit: str, decimals: int = 2, factor: float = 1.0
) -> list[Plot]:
    """A plot with a bar for each method that has a value; none without values."""
    bars = []
    for method in methods:
        value, name, is_lossy = spread(method.get(field), factor), name_of(method), bool(method.get("is_lossy"))
        if value is not None:
            bars.append(Bar(f"{name}, lossy" if is_lossy else name, name, value, is_lossy))
    return [plot_bars(title, note, bars, unit, decimals)] if bars else []
