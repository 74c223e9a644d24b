"""Sections of the report: plots of one question, with a table."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hf_speculate.stats import STAGES
from hf_speculate.tools.bench.report.plots import (
    Plot,
    Style,
    plot_bars,
    plot_dots,
    plot_positions,
    plot_rounds,
    plot_stacks,
    plot_thresholds,
)
from hf_speculate.tools.bench.report.values import (
    MISSING,
    Result,
    Spread,
    fixed,
    number,
    numbers,
    rows,
    share,
    spread,
    text,
)

_SPEEDUP = "Speed-up over plain decoding"
_GIB = 2.0**30
Styles = Mapping[str, Style]


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

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not self.plots and self.table is None


def name_of(method: Result) -> str:
    """Name of a method in the report; those of this library begin with its name."""
    name = str(method["name"])
    return f"hf_speculate, {name}" if method.get("engine") == "ours" else name


def speed(methods: list[Result], styles: Styles, remarks: Sequence[str]) -> Section:
    """Speed-ups, with a table of all methods."""
    note = "Median; the thin line goes from minimum to maximum. Dashed bars: lossy verifiers."
    bars = _bars(methods, styles, "speedup")
    plots: list[Plot] = [plot_bars(_SPEEDUP, note, bars)] if bars else []
    head = "method, verifier, output, K, tokens/s, speed-up, acceptance length, acceptance rate, compared with plain"
    lines = []
    for method in methods:
        tokens_per_s, speedup = spread(method.get("tokens_per_s")), spread(method.get("speedup"))
        lines.append(
            [
                name_of(method),
                text(method.get("verifier")),
                "lossy" if method.get("is_lossy") else "exact",
                text(method.get("num_assistant_tokens")),
                _text(tokens_per_s, 1 if tokens_per_s is not None and tokens_per_s.low < 10 else 0),
                _text(speedup, 2) + (" (noise)" if method.get("is_noise") else ""),
                fixed(number(method.get("mean_acceptance_length"))),
                share(number(method.get("acceptance_rate"))),
                text(method.get("checked")),
            ]
        )
    note = "Median (minimum to maximum). K: drafted tokens per round, if constant."
    return Section("Speed", "", plots, _table("All methods", note, head, lines, 3), remarks)


def latency(methods: list[Result], styles: Styles) -> Section:
    """Time to the first token, time per token, and peak memory."""
    plots: list[Plot] = []
    for field, title, factor, decimals in (
        ("first_token_s", "Time to first token", 1000.0, 1),
        ("ms_per_token", "Time per token", 1.0, 2),
    ):
        bars = _bars(methods, styles, field, factor)
        if bars:
            plots.append(plot_bars(title, "Lower is better.", bars, " ms", decimals))
    lines = []
    for method in methods:
        first, peak = spread(method.get("first_token_s")), number(method.get("peak_bytes"))
        lines.append(
            [
                name_of(method),
                _text(None if first is None else first.scaled(1000.0), 1),
                _text(spread(method.get("ms_per_token")), 2),
                fixed(None if peak is None else peak / _GIB),
            ]
        )
    head = "method, time to first token (ms), ms per token, peak memory (GiB)"
    note = "Peak memory is measured on CUDA devices."
    has_values = any(cell != MISSING for line in lines for cell in line[1:])
    table = _table("Latency and memory", note, head, lines, 1) if has_values else None
    return Section("Latency and memory", "", plots, table)


def rounds(methods: list[Result], styles: Styles) -> Section:
    """Acceptance by position, draft lengths of adaptive schedules, and time by stage."""
    positions, lens, seconds = {}, {}, {}
    for method in methods:
        name, values = name_of(method), numbers(method.get("draft_lens"))
        positions[name] = numbers(method.get("acceptance_rate_per_position"))
        lens[name] = values if method.get("num_assistant_tokens") is None and len(set(values)) > 1 else []
        seconds[name] = _seconds(method)
    positions, lens = ({name: values for name, values in one.items() if values} for one in (positions, lens))
    seconds = {name: parts for name, parts in seconds.items() if sum(parts) > 0}
    plots: list[Plot] = []
    if positions:
        note = "Accepted tokens over drafted tokens at each position of the draft."
        plots.append(plot_positions("Acceptance rate by position", note, positions, styles))
    if lens:
        note = "Tokens drafted in each round of one call; 0 is a plain step. Long calls show means over rounds."
        plots.append(plot_rounds("Draft length over time", note, lens, styles))
    if seconds:
        note = "Share of the measured time; score and prefill are the target's forwards."
        plots.append(plot_stacks("Time by stage", note, STAGES, seconds))
    return Section("Inside a round", "", plots, None)


def categories(result: Result, names: Mapping[str, str], styles: Styles) -> Section:
    """Speed-ups by category of prompts."""
    groups: dict[str, list[tuple[str, float]]] = {}
    lines = []
    for row in rows(result, "categories"):
        category, num_prompts = text(row.get("category")), row.get("num_prompts")
        method, value = names[str(row.get("method"))], spread(row.get("speedup"))
        of_them = "" if num_prompts is None else f" ({text(num_prompts)} {'prompt' if num_prompts == 1 else 'prompts'})"
        if value is not None:
            groups.setdefault(category + of_them, []).append((method, value.middle))
        rate = share(number(row.get("acceptance_rate")))
        lines.append([category, method, _text(value, 2), rate, text(num_prompts)])
    note = "A marker for each method; the dotted line is plain decoding."
    plots: list[Plot] = [plot_dots(_SPEEDUP, note, groups, styles)] if groups else []
    table = _table("All categories", "", "category, method, speed-up, acceptance rate, prompts", lines, 2)
    return Section("By category", "", plots, table)


def drift(result: Result, styles: Styles) -> Section:
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
    table = _table("All thresholds", "", head, list(map(_drift_line, found)), 1)
    return Section("Drift of lossy verifiers", note if found else "", _drift_plots(found, styles), table)


def drift_names(result: Result) -> list[str]:
    """Names of the series of the drift plots."""
    return list(dict.fromkeys(text(row.get("verifier")) for row in rows(result, "drift")))


def _drift_plots(found: list[Result], styles: Styles) -> list[Plot]:
    wanted = (
        ("log_likelihood_per_token", "Log-likelihood per token", "Of the output under the target, in nats."),
        ("agreement_with_greedy", "Agreement with greedy", "Share of tokens that greedy decoding would choose."),
        ("speedup", _SPEEDUP, "On the same prompts."),
    )
    plots: list[Plot] = []
    for field, title, note in wanted:
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
            plots.append(plot_thresholds(title, note, curves, references, styles, "posterior_threshold"))
    return plots


def _drift_line(row: Result) -> list[str]:
    return [
        text(row.get("verifier")),
        text(row.get("posterior_threshold")),
        _text(spread(row.get("tokens_per_s")), 0),
        _text(spread(row.get("speedup")), 2),
        fixed(number(row.get("log_likelihood_per_token")), 3),
        share(number(row.get("agreement_with_greedy"))),
        text(row.get("num_tokens")),
    ]


def _bars(
    methods: list[Result], styles: Styles, field: str, factor: float = 1.0
) -> list[tuple[str, Spread, Style, bool]]:
    """Bars of the methods that have a value."""
    found = []
    for method in methods:
        value, name, is_lossy = spread(method.get(field)), name_of(method), bool(method.get("is_lossy"))
        if value is not None:
            label = f"{name}, lossy" if is_lossy else name
            found.append((label, value.scaled(factor), styles[name], is_lossy))
    return found


def _seconds(method: Result) -> list[float]:
    """Seconds by stage; 0 where a stage is missing."""
    taken: Any = method.get("seconds")
    if not isinstance(taken, Mapping):
        return [0.0] * len(STAGES)
    return [max(number(taken.get(stage)) or 0.0, 0.0) for stage in STAGES]


def _text(value: Spread | None, decimals: int) -> str:
    return MISSING if value is None else value.text(decimals)


def _table(title: str, note: str, head: str, lines: list[list[str]], num_names: int) -> Table | None:
    """A table without columns that are the same in all of several lines; the note has their value."""
    names = head.split(", ")
    if not lines:
        return None
    is_constant = [len(lines) > 1 and len({line[at] for line in lines}) == 1 for at in range(len(names))]
    constant = [f"{names[at]}: {lines[0][at]}" for at in range(len(names)) if is_constant[at]]
    constant = [one for one in constant if not one.endswith(f": {MISSING}")]
    kept = [at for at in range(len(names)) if not is_constant[at]]
    note = " ".join(filter(None, [note, f"The same for all: {'; '.join(constant)}." if constant else ""]))
    num_names = sum(at < num_names for at in kept)
    return Table(title, note, [names[at] for at in kept], [[line[at] for at in kept] for line in lines], num_names)
