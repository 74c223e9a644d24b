"""Writes a benchmark's result as one HTML page that loads nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from hf_speculate.errors import ConfigError
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

_PLAIN = "plain"  # first word of the names of ways without drafts, up to a comma
_LEFT_OUT = "left_out"
_STAGES = ("prefill", "draft", "score", "verify", "bookkeeping")
_SPEEDS = ("tokens_per_s", "over_plain")


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
    way: str
    spread: str  # empty where there was one run
    checked: str  # empty where nothing was compared
    is_faster: bool


def write_html(result: Mapping[str, Any], path: str | Path) -> Path:
    """Write a result as one page: a headline, tables and plots, without scripts or anything from elsewhere.

    Names and texts in the result are shown as they are, never read as HTML. What the result lacks is left out.

    Args:
        result: what `hf-speculate bench --json` writes. `ways`, a list with at least one entry, holds of each way to
            decode `name`, `verifier`, `num_assistant_tokens`, `is_lossy`, `tokens_per_s` and `over_plain` (`min`,
            `median`, `max`), `tokens_per_round`, `acceptance`, `acceptance_by_position`, `draft_lens` (tokens drafted,
            round by round), `seconds` (by stage), `checked` (what was compared with plain decoding, in words) and
            `fallbacks` (what ran otherwise than asked). Names of ways without drafts begin with "plain".
            `categories` holds `category`, `way`, `over_plain`, `acceptance`, `num_prompts`; `drift` holds `verifier`,
            `posterior_threshold` (None: a row to compare with), `tokens_per_s`, `over_plain`,
            `log_likelihood_per_token` (nats), `agreement_with_greedy` (0 to 1), `num_tokens`; `circumstances` and
            `settings` hold plain values by name; `left_out` among the settings says, by name, why a way is not shown.
        path: of the file; one that exists is replaced.

    Returns:
        The path.

    Raises:
        ConfigError: the result holds no ways.
        OSError: the file cannot be written.
    """
    ways = [way for way in rows(result, "ways") if way.get("name")]
    if not ways:
        raise ConfigError(
            "result must hold at least one entry with a name under 'ways', got none; "
            "pass what hf-speculate bench --json wrote"
        )
    hues = _hues(ways, result)
    environment = Environment(
        loader=PackageLoader("hf_speculate.tools.bench.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    settings = result.get("settings") or {}
    sections = [_ways(ways, hues, settings), _rounds(ways, hues), _categories(result, hues), _drift(result)]
    page = environment.get_template("page.html").render(
        headline=_headline(ways),
        circumstances=_pairs(result.get("circumstances")),
        settings=[pair for pair in _pairs(settings) if pair[0] != _LEFT_OUT],
        sections=[section for section in sections if section.plots or section.table],
    )
    written = Path(path)
    written.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")  # names of files may hold lone surrogates
    return written


def _hues(ways: list[Result], result: Result) -> dict[str, int]:
    """A colour for each way, the same in all plots."""
    names = [str(way["name"]) for way in ways] + [str(row.get("way")) for row in rows(result, "categories")]
    return {name: place % NUM_HUES for place, name in enumerate(dict.fromkeys(names))}


def _pairs(values: Any) -> list[tuple[str, str]]:
    return [(str(name), text(value)) for name, value in values.items()] if isinstance(values, Mapping) else []


def _headline(ways: list[Result]) -> Headline | None:
    """The fastest way that keeps the target's text or law; None where only plain decoding does."""
    exact = [way for way in ways if not way.get("is_lossy") and str(way["name"]).partition(",")[0] != _PLAIN]
    speeds = [(way, spread(way.get("over_plain"))) for way in exact]
    found = [(way, speed) for way, speed in speeds if speed is not None]
    if not found:
        return None
    way, speed = max(found, key=lambda one: one[1].middle)
    has_spread = speed.low != speed.high
    return Headline(
        f"{short(speed.middle)}{TIMES}",
        str(way["name"]),
        f"{short(speed.low)} to {short(speed.high)}" if has_spread else "",
        text(way["checked"]) if way.get("checked") else "",
        speed.middle > 1,
    )


def _ways(ways: list[Result], hues: Mapping[str, int], settings: Result) -> Section:
    bars: list[tuple[str, Spread, int, bool]] = []
    for way in ways:
        speed, name = spread(way.get("over_plain")), str(way["name"])
        if speed is not None:
            is_lossy = bool(way.get("is_lossy"))
            bars.append((f"{name}, lossy" if is_lossy else name, speed, hues[name], is_lossy))
    note = "Medians, with lines from the slowest to the fastest run. Outlined bars: the text's law is not the target's."
    plots: list[Plot] = [plot_bars("Times plain decoding's speed", note, bars)] if bars else []
    head = ["way", "verifier", "text", "K", "tokens/s", "times plain", "tokens a round", "acceptance", "checked"]
    lines = []
    for way in ways:
        speeds = [spread(way.get(name)) for name in _SPEEDS]
        lines.append(
            [
                text(way["name"]),
                text(way.get("verifier")),
                "lossy" if way.get("is_lossy") else "exact",
                text(way.get("num_assistant_tokens")),
                *(MISSING if speed is None else speed.text() for speed in speeds),
                short(number(way.get("tokens_per_round"))),
                share(number(way.get("acceptance"))),
                text(way.get("checked")),
            ]
        )
    table = Table("Every way", "Median (minimum to maximum). K: tokens drafted a round.", head, lines, 3)
    remarks = [f"{way['name']}: {text(reason)}" for way in ways for reason in way.get("fallbacks") or ()]
    remarks += [f"{name}: left out, {reason}" for name, reason in _pairs(settings.get(_LEFT_OUT))]
    return Section("Speed", "", plots, table, remarks)


def _rounds(ways: list[Result], hues: Mapping[str, int]) -> Section:
    named = {str(way["name"]): way for way in ways}
    positions = {name: numbers(way.get("acceptance_by_position")) for name, way in named.items()}
    lens = {name: numbers(way.get("draft_lens")) for name, way in named.items()}
    seconds = {name: _seconds(way) for name, way in named.items()}
    positions, lens = _filled(positions), _filled(lens)
    seconds = {name: parts for name, parts in seconds.items() if sum(parts) > 0}
    plots: list[Plot] = []
    if positions:
        note = "Share of drafted tokens that stayed, of those that were judged at that place."
        plots.append(plot_positions("Acceptance by position", note, positions, hues))
    if lens:
        note = "K round by round in one call; 0 is a plain step. Long calls are averaged over neighbouring rounds."
        plots.append(plot_rounds("Tokens drafted over time", note, lens, hues))
    if seconds:
        note = "Share of the measured time; score and prefill are the target's forwards."
        plots.append(plot_stacks("Time by stage", note, _STAGES, seconds))
    return Section("Inside a round", "", plots, None)


def _seconds(way: Result) -> list[float]:
    """By stage, 0 where one is missing."""
    taken = way.get("seconds")
    if not isinstance(taken, Mapping):
        return [0.0] * len(_STAGES)
    return [max(number(taken.get(stage)) or 0.0, 0.0) for stage in _STAGES]


def _filled(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: values for name, values in curves.items() if values}


def _categories(result: Result, hues: Mapping[str, int]) -> Section:
    groups: dict[str, list[tuple[str, float]]] = {}
    lines = []
    for row in rows(result, "categories"):
        category, way, num_prompts = text(row.get("category")), str(row.get("way")), row.get("num_prompts")
        speed = spread(row.get("over_plain"))
        of_them = "" if num_prompts is None else f" ({text(num_prompts)} {'prompt' if num_prompts == 1 else 'prompts'})"
        if speed is not None:
            groups.setdefault(category + of_them, []).append((way, speed.middle))
        speed_text = MISSING if speed is None else speed.text()
        lines.append([category, way, speed_text, share(number(row.get("acceptance"))), text(num_prompts)])
    note = "A dot for each way; the line marks plain decoding."
    plots: list[Plot] = [plot_dots("Times plain decoding's speed", note, groups, hues)] if groups else []
    table = Table("Every category", "", ["category", "way", "times plain", "acceptance", "prompts"], lines, 2)
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
        ("over_plain", "Times plain decoding's speed", "On the same prompts."),
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
