"""Writes a benchmark's result as one HTML page that loads nothing."""

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hf_speculate.errors import ConfigError
from hf_speculate.tools.bench.report import sections
from hf_speculate.tools.bench.report.plots import Style
from hf_speculate.tools.bench.report.sections import name_of
from hf_speculate.tools.bench.report.values import Result, short, spread, text

_PLAIN = "plain"  # methods without drafts are named so, up to a comma
_ELSEWHERE = ("command", "drift_num_assistant_tokens", "left_out")  # settings that are shown in other places
_TOP = ("target", "draft", "device", "threads", "dtype", "date")  # of the environment, in this order


def write_html(result: Mapping[str, Any], path: str | Path) -> Path:
    """Write a result as one page with tables and plots, without scripts or external files; returns the path.

    Names and texts in the result are shown as they are, never read as HTML. Missing values are left out.

    Args:
        result: as `hf-speculate bench --json` prints it, with at least one method.
        path: of the file, which is replaced if it exists.
    """
    methods: list[Result] = result.get("methods") or []
    if not methods:
        raise ConfigError(
            "result must have at least one entry with a name under 'methods', got none; "
            "pass the JSON of hf-speculate bench"
        )
    names, styles = {method["name"]: name_of(method) for method in methods}, method_styles(result)
    settings: Result = result.get("settings") or {}
    where: Result = result.get("environment") or {}
    found = [
        sections.speed(methods, _remarks(methods, settings)),
        sections.latency(methods),
        sections.rounds(methods),
        sections.categories(result, names, list(styles)),
        sections.drift(result),
    ]
    samples: dict[str, list[str]] = {}  # names of the methods that wrote a text
    for method in methods:
        if method.get("sample"):
            samples.setdefault(str(method["sample"]), []).append(name_of(method))
    environment = Environment(
        loader=PackageLoader("hf_speculate.tools.bench.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short, "spread": spread, "name_of": name_of}
    page = environment.get_template("page.html").render(
        title=_title(where),
        fastest=_fastest(methods),
        doubts=[str(reason) for reason in (result.get("reliability") or {}).get("reasons") or ()],
        environment=[(name, text(where[name])) for name in _TOP if where.get(name) is not None]
        + [(name, text(value)) for name, value in where.items() if name not in _TOP],
        command=str(settings.get("command") or ""),
        sections=[section for section in found if section.plots or section.table],
        styles=styles,
        prompt=str(result.get("prompt") or ""),
        samples=samples,
        settings=[(str(name), text(value)) for name, value in settings.items() if name not in _ELSEWHERE],
    )
    written = Path(path)
    written.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")  # names of files may hold lone surrogates
    return written


def method_styles(result: Mapping[str, Any]) -> dict[str, Style]:
    """Colour and marker of each method; a verifier under drift has those of its method."""
    methods: list[Result] = result["methods"]
    styles = {name: Style.of(index) for index, name in enumerate(dict.fromkeys(map(name_of, methods)))}
    label = (result.get("settings") or {}).get("drift_num_assistant_tokens")
    for name in sections.drift_names(result):
        same = [name_of(one) for one in methods if name == (one.get("verifier") or one["name"])]
        exact = [one for one in same if label is not None and one.endswith(str(label))]
        styles.setdefault(name, styles[(exact or same)[0]] if same else Style.of(len(styles)))
    return styles


def _title(where: Result) -> str:
    models = " with ".join(str(where[name]) for name in ("target", "draft") if where.get(name))
    rest = [str(where[name]) for name in ("device", "date") if where.get(name)]
    return ", ".join(filter(None, [models, *rest]))


def _fastest(methods: list[Result]) -> Result | None:
    """The fastest lossless method that is not flagged as noise; None if there is only plain decoding."""
    found = [
        (speedup.middle, method)
        for method in methods
        if not method.get("is_lossy") and not method.get("is_noise")
        if str(method["name"]).partition(",")[0] != _PLAIN and (speedup := spread(method.get("speedup"))) is not None
    ]
    return max(found, key=itemgetter(0), default=(0.0, None))[1]


def _remarks(methods: list[Result], settings: Result) -> list[str]:
    """What ran otherwise than requested, or was left out."""
    remarks = [f"{name_of(method)}: {text(reason)}" for method in methods for reason in method.get("fallbacks") or ()]
    left_out = settings.get("left_out") or {}
    return remarks + [f"{name}: left out, {text(reason)}" for name, reason in left_out.items()]
