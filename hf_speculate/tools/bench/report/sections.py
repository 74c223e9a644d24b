"""Sections of the report: plots of one question, with a table."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hf_speculate.stats import STAGES
from hf_speculate.tools.bench.report.plots import (
    Bar,
    Plot,
    plot_bars,
    plot_dots,
    plot_positions,
    plot_rounds,
    plot_stacks,
    plot_thresholds,
)
from hf_speculate.tools.bench.report.values import MISSING, Result, fixed, number, numbers, rows, share, spread, text

_SPEEDUP = "Speed-up over plain decoding"
_DRIFT_PLOTS = (  # field, title, note
    ("log_likelihood_per_token", "Log-likelihood per token", "Of the output under the target, in nats."),
    ("agreement_with_greedy", "Agreement with greedy", "Share of tokens that greedy decoding would choose."),
    ("speedup", _SPEEDUP, "On the same prompts."),
)


class Table(NamedTuple):
    """Rows of text; the first `num_names` columns are words."""

    title: str
    note: str
    head: list[str]
    lines: list[list[str]]
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
    note = "Median; the thin line goes from minimum to maximum. Dashed bars: lossy verifiers."
    bars = _bars(methods, "speedup")
    head = "method, verifier, output, K, tokens/s, speed-up, acceptance length, acceptance rate, compared with plain"
    lines = []
    for method in methods:
        tokens_per_s = spread(method.get("tokens_per_s"))
        lines.append(
            [
                name_of(method),
                text(method.get("verifier")),
                "lossy" if method.get("is_lossy") else "exact",
                text(method.get("num_assistant_tokens")),
                MISSING if tokens_per_s is None else tokens_per_s.text(1 if tokens_per_s.low < 10 else 0),
                fixed(method.get("speedup")) + (" (noise)" if method.get("is_noise") else ""),
                fixed(method.get("mean_acceptance_length")),
                share(method.get("acceptance_rate")),
                text(method.get("checked")),
            ]
        )
    table = _table(
        "All methods", "Median (minimum to maximum). K: drafted tokens per round, if constant.", head, lines, 3
    )
    return Section("Speed", "", [plot_bars(_SPEEDUP, note, bars)] if bars else [], table, remarks)


def latency(methods: list[Result]) -> Section:
    """Time to the first token, time per token, and peak memory."""
    first, later = _bars(methods, "first_token_s", 1000.0), _bars(methods, "ms_per_token")
    plots = [plot_bars("Time to first token", "Lower is better.", first, " ms", 1)] if first else []
    plots += [plot_bars("Time per token", "Lower is better.", later, " ms")] if later else []
    lines = [
        [
            name_of(method),
            fixed(method.get("first_token_s"), 1, 1000.0),
            fixed(method.get("ms_per_token")),
            fixed(method.get("peak_bytes"), factor=2.0**-30),
        ]
        for method in methods
    ]
    head = "method, time to first token (ms), ms per token, peak memory (GiB)"
    has_values = any(cell != MISSING for line in lines for cell in line[1:])
    table = _table(
        "Latency and memory", "Peak memory is measured on CUDA devices.", head, lines if has_values else [], 1
    )
    return Section("Latency and memory", "", plots, table)


def rounds(methods: list[Result]) -> Section:
    """Acceptance by position, draft lengths of adaptive schedules, and time by stage."""
    positions, lens, seconds = {}, {}, {}
    for method in methods:
        name, values, taken = name_of(method), numbers(method.get("draft_lens")), method.get("seconds")
        if rates := numbers(method.get("acceptance_rate_per_position")):
            positions[name] = rates
        if method.get("num_assistant_tokens") is None and len(set(values)) > 1:
            lens[name] = values
        stages = [max(number(taken.get(stage)) or 0.0, 0.0) for stage in STAGES] if isinstance(taken, Mapping) else []
        if sum(stages) > 0:
            seconds[name] = stages
    plots: list[Plot] = []
    if positions:
        note = "Accepted tokens over drafted tokens at each position of the draft."
        plots.append(plot_positions("Acceptance rate by position", note, positions))
    if lens:
        note = "Tokens drafted in each round of one call; 0 is a plain step. Long calls show means over rounds."
        plots.append(plot_rounds("Draft length over time", note, lens))
    if seconds:
        note = "Share of the measured time; score and prefill are the target's forwards."
        plots.append(plot_stacks("Time by stage", note, STAGES, seconds))
    return Section("Inside a round", "", plots, None)


def categories(result: Result, names: Mapping[str, str], methods: Sequence[str]) -> Section:
    """Speed-ups by category of prompts."""
    groups: dict[str, list[tuple[str, float]]] = {}
    lines = []
    for row in rows(result, "categories"):
        category, num_prompts = text(row.get("category")), row.get("num_prompts")
        method, value = names[str(row.get("method"))], spread(row.get("speedup"))
        of_them = "" if num_prompts is None else f" ({text(num_prompts)} {'prompt' if num_prompts == 1 else 'prompts'})"
        if value is not None:
            groups.setdefault(category + of_them, []).append((method, value.middle))
        numbers_of_it = [fixed(row.get("speedup")), share(row.get("acceptance_rate")), text(num_prompts)]
        lines.append([category, method, *numbers_of_it])
    note = "A marker for each method; the dotted line is plain decoding."
    table = _table("All categories", "", "category, method, speed-up, acceptance rate, prompts", lines, 2)
    return Section("By category", "", [plot_dots(_SPEEDUP, note, groups, methods)] if groups else [], table)


def drift(result: Result) -> Section:
    """Speed of lossy verifiers, and the difference of their output from plain decoding's."""
    found = rows(result, "drift")
    note = (
        "A lossy verifier also accepts drafted tokens that plain decoding would not have chosen. These plots show the "
        "difference of its output for several thresholds; rows without a threshold are plain decoding."
    )
    label = (result.get("settings") or {}).get("drift_num_assistant_tokens")
    if label is not None:
        note = f"{note} Draft length: {text(label)}."
    head = "verifier, threshold, tokens/s, speed-up, log-likelihood per token, agreement with greedy, tokens"
    lines = [
        [
            text(row.get("verifier")),
            text(row.get("posterior_threshold")),
            fixed(row.get("tokens_per_s"), 0),
            fixed(row.get("speedup")),
            fixed(row.get("log_likelihood_per_token"), 3),
            share(row.get("agreement_with_greedy")),
            text(row.get("num_tokens")),
        ]
        for row in found
    ]
    table = _table("All thresholds", "", head, lines, 1)
    return Section("Drift of lossy verifiers", note if found else "", _drift_plots(found), table)


def drift_names(result: Result) -> list[str]:
    """Names of the series of the drift plots."""
    return list(dict.fromkeys(text(row.get("verifier")) for row in rows(result, "drift")))


def _drift_plots(found: list[Result]) -> list[Plot]:
    plots = []
    for field, title, note in _DRIFT_PLOTS:
        curves: dict[str, list[tuple[float, float]]] = {}
        references: dict[str, float] = {}
        for row in found:
            name, threshold = text(row.get("verifier")), number(row.get("posterior_threshold"))
            value = spread(row.get(field))
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


def _table(title: str, note: str, head: str, lines: list[list[str]], num_names: int) -> Table | None:
    """A table without columns that are the same in all of several lines; the note has their value."""
    if not lines:
        return None
    names = head.split(", ")
    kept = [at for at in range(len(names)) if len(lines) == 1 or len({line[at] for line in lines}) > 1]
    constant = [
        f"{name}: {lines[0][at]}" for at, name in enumerate(names) if at not in kept and lines[0][at] != MISSING
    ]
    note = " ".join(filter(None, [note, f"The same for all: {'; '.join(constant)}." if constant else ""]))
    num_names = sum(at < num_names for at in kept)
    return Table(title, note, [names[at] for at in kept], [[line[at] for at in kept] for line in lines], num_names)
