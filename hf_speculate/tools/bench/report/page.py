"""Writes a benchmark's result as one HTML page that loads nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from hf_speculate.errors import ConfigError
from hf_speculate.stats import STAGES
from hf_speculate.tools.bench.report.plots import (
    NUM_HUES,
    Plot,
    plot_bars,
    plot_dots,
    plot_positions,
    plot_rounds,
    plot_stacks,
    plot_thresholds,
)
from hf_speculate.tools.bench.report.values import (
    MISSING,
    TIMES,
    Result,
    Spread,
    number,
    numbers,
    rows,
    share,
    short,
    spread,
    text,
)

_PLAIN = "plain"  # first word of the names of methods without drafts, up to a comma
_LEFT_OUT = "left_out"
_SPEEDS = ("tokens_per_s", "speedup")


class Table(NamedTuple):
    """Lines below one another."""

    title: str
    note: str
    head: list[str]
    lines: list[list[str]]
    num_names: int  # columns of words, at the left


class Section(NamedTuple):
    """Plots of one question, with a table."""

    title: str
    note: str
    plots: list[Plot]
    table: Table | None
    remarks: Sequence[str] = ()


class Headline(NamedTuple):
    """The figure that the page begins with."""

    figure: str
    method: str
    spread: str  # empty where there was one run
    checked: str  # empty where nothing was compared
    is_faster: bool


def write_html(result: Mapping[str, Any], path: str | Path) -> Path:
    """Write a result as one page: a headline, tables and plots, without scripts or anything from elsewhere.

    Names and texts in the result are shown as they are, never read as HTML. What the result lacks is left out.

    Args:
        result: what `hf-speculate bench --json` writes. `methods`, a list with at least one entry, holds for each
            method `name`, `verifier`, `num_assistant_tokens`, `is_lossy`, `tokens_per_s` and `speedup` (`min`,
            `median`, `max`), `mean_acceptance_length`, `acceptance_rate`, `acceptance_rate_per_position`, `draft_lens`
            (tokens drafted, round by round), `seconds` (by stage), `checked` (what was compared with plain decoding, in
            words) and `fallbacks` (what ran otherwise than requested). Names of methods without drafts begin with
            "plain". `categories` holds `category`, `method`, `speedup`, `acceptance_rate`, `num_prompts`; `drift` holds
            `verifier`, `posterior_threshold` (None: a row to compare with), `tokens_per_s`, `speedup`,
            `log_likelihood_per_token` (nats), `agreement_with_greedy` (0 to 1), `num_tokens`; `environment` and
            `settings` hold plain values by name; `left_out` among the settings gives the reason for each method that is
            not shown.
        path: of the file; one that exists is replaced.

    Returns:
        The path.

    Raises:
        ConfigError: the result holds no methods.
        OSError: the file cannot be written.
    """
    methods = [method for method in rows(result, "methods") if method.get("name")]
    if not methods:
        raise ConfigError(
            "result must hold at least one entry with a name under 'methods', got none; "
            "pass what hf-speculate bench --json wrote"
        )
    hues = _hues(methods, result)
    environment = Environment(
        loader=PackageLoader("hf_speculate.tools.bench.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    settings = result.get("settings") or {}
    sections = [_methods(methods, hues, settings), _rounds(methods, hues), _categories(result, hues), _drift(result)]
    page = environment.get_template("page.html").render(
        headline=_headline(methods),
        circumstances=_pairs(result.get("environment")),
        settings=[pair for pair in _pairs(settings) if pair[0] != _LEFT_OUT],
        sections=[section for section in sections if section.plots or section.table],
    )
    written = Path(path)
    written.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")  # names of files may hold lone surrogates
    return written


def _hues(methods: list[Result], result: Result) -> dict[str, int]:
    """A colour for each method, the same in all plots."""
    names = [str(method["name"]) for method in methods] + [str(row.get("method")) for row in rows(result, "categories")]
    return {name: place % NUM_HUES for place, name in enumerate(dict.fromkeys(names))}


def _pairs(values: Any) -> list[tuple[str, str]]:
    return [(str(name), text(value)) for name, value in values.items()] if isinstance(values, Mapping) else []


def _headline(methods: list[Result]) -> Headline | None:
    """The fastest lossless method; None if there is none but plain decoding."""
    exact = [
        method for method in methods if not method.get("is_lossy") and str(method["name"]).partition(",")[0] != _PLAIN
    ]
    speeds = [(method, spread(method.get("speedup"))) for method in exact]
    found = [(method, speed) for method, speed in speeds if speed is not None]
    if not found:
        return None
    method, speed = max(found, key=lambda one: one[1].middle)
    has_spread = speed.low != speed.high
    return Headline(
        f"{short(speed.middle)}{TIMES}",
        str(method["name"]),
        f"{short(speed.low)} to {short(speed.high)}" if has_spread else "",
        text(method["checked"]) if method.get("checked") else "",
        speed.middle > 1,
    )


def _methods(methods: list[Result], hues: Mapping[str, int], settings: Result) -> Section:
    bars: list[tuple[str, Spread, int, bool]] = []
    for method in methods:
        speed, name = spread(method.get("speedup")), str(method["name"])
        if speed is not None:
            is_lossy = bool(method.get("is_lossy"))
            bars.append((f"{name}, lossy" if is_lossy else name, speed, hues[name], is_lossy))
    note = "Medians, with lines from the slowest to the fastest run. Outlined bars: the verifier is lossy."
    plots: list[Plot] = [plot_bars("Times plain decoding's speed", note, bars)] if bars else []
    head = [
        "method",
        "verifier",
        "text",
        "K",
        "tokens/s",
        "times plain",
        "mean length",
        "acceptance rate",
        "checked",
    ]
    lines = []
    for method in methods:
        speeds = [spread(method.get(name)) for name in _SPEEDS]
        lines.append(
            [
                text(method["name"]),
                text(method.get("verifier")),
                "lossy" if method.get("is_lossy") else "exact",
                text(method.get("num_assistant_tokens")),
                *(MISSING if speed is None else speed.text() for speed in speeds),
                short(number(method.get("mean_acceptance_length"))),
                share(number(method.get("acceptance_rate"))),
                text(method.get("checked")),
            ]
        )
    table = Table("Every method", "Median (minimum to maximum). K: tokens drafted a round.", head, lines, 3)
    remarks = [f"{method['name']}: {text(reason)}" for method in methods for reason in method.get("fallbacks") or ()]
    remarks += [f"{name}: left out, {reason}" for name, reason in _pairs(settings.get(_LEFT_OUT))]
    return Section("Speed", "", plots, table, remarks)


def _rounds(methods: list[Result], hues: Mapping[str, int]) -> Section:
    named = {str(method["name"]): method for method in methods}
    positions = {name: numbers(method.get("acceptance_rate_per_position")) for name, method in named.items()}
    lens = {name: numbers(method.get("draft_lens")) for name, method in named.items()}
    seconds = {name: _seconds(method) for name, method in named.items()}
    positions, lens = _filled(positions), _filled(lens)
    seconds = {name: parts for name, parts in seconds.items() if sum(parts) > 0}
    plots: list[Plot] = []
    if positions:
        note = "Accepted tokens over drafted tokens at each position of the draft."
        plots.append(plot_positions("Acceptance by position", note, positions, hues))
    if lens:
        note = "K round by round in one call; 0 is a plain step. Long calls are averaged over neighbouring rounds."
        plots.append(plot_rounds("Tokens drafted over time", note, lens, hues))
    if seconds:
        note = "Share of the measured time; score and prefill are the target's forwards."
        plots.append(plot_stacks("Time by stage", note, STAGES, seconds))
    return Section("Inside a round", "", plots, None)


def _seconds(method: Result) -> list[float]:
    """By stage, 0 where one is missing."""
    taken = method.get("seconds")
    if not isinstance(taken, Mapping):
        return [0.0] * len(STAGES)
    return [max(number(taken.get(stage)) or 0.0, 0.0) for stage in STAGES]


def _filled(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: values for name, values in curves.items() if values}


def _categories(result: Result, hues: Mapping[str, int]) -> Section:
    groups: dict[str, list[tuple[str, float]]] = {}
    lines = []
    for row in rows(result, "categories"):
        category, method, num_prompts = text(row.get("category")), str(row.get("method")), row.get("num_prompts")
        speed = spread(row.get("speedup"))
        of_them = "" if num_prompts is None else f" ({text(num_prompts)} {'prompt' if num_prompts == 1 else 'prompts'})"
        if speed is not None:
            groups.setdefault(category + of_them, []).append((method, speed.middle))
        speed_text = MISSING if speed is None else speed.text()
        lines.append([category, method, speed_text, share(number(row.get("acceptance_rate"))), text(num_prompts)])
    note = "A dot for each method; the line marks plain decoding."
    plots: list[Plot] = [plot_dots("Times plain decoding's speed", note, groups, hues)] if groups else []
    table = Table("Every category", "", ["category", "method", "times plain", "acceptance rate", "prompts"], lines, 2)
    return Section("By category", "", plots, table if lines else None)


def _drift(result: Result) -> Section:
    """Speed beside what it costs: how likely the target finds the text, and how often it would have said the same."""
    found = rows(result, "drift")
    note = (
        "A lossy verifier lets the draft's tokens stay where the target does not object, so the text drifts from what "
        "the target would have written. Rows without a threshold are what to compare with."
    )
    head = "verifier, threshold, tokens/s, times plain, log-likelihood per token, agreement with greedy, tokens"
    table = Table("Every threshold", "", head.split(", "), list(map(_drift_line, found)), 1)
    return Section("Drift of lossy verifiers", note, _drift_plots(found), table if found else None)


def _drift_plots(found: list[Result]) -> list[Plot]:
    names = dict.fromkeys(text(row.get("verifier")) for row in found)
    hues = {name: place % NUM_HUES for place, name in enumerate(names)}
    wanted = (
        ("log_likelihood_per_token", "Log-likelihood per token", "Under the target, in nats; higher is likelier."),
        ("agreement_with_greedy", "Agreement with greedy", "Share of tokens that are the target's likeliest there."),
        ("speedup", "Times plain decoding's speed", "On the same prompts."),
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
            plots.append(plot_thresholds(title, note, curves, references, hues, "posterior_threshold"))
    return plots


def _drift_line(row: Result) -> list[str]:
    speeds, nats = [spread(row.get(name)) for name in _SPEEDS], number(row.get("log_likelihood_per_token"))
    return [
        text(row.get("verifier")),
        text(row.get("posterior_threshold")),
        *(MISSING if speed is None else speed.text() for speed in speeds),
        MISSING if nats is None else f"{nats:.3f}",
        share(number(row.get("agreement_with_greedy"))),
        text(row.get("num_tokens")),
    ]
