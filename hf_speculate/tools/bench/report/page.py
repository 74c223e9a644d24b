"""Writes a benchmark's result as one HTML page that loads nothing."""

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hf_speculate.errors import ConfigError
from hf_speculate.tools.bench.report import sections
from hf_speculate.tools.bench.report.tables import name_of
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
    settings: Result = result.get("settings") or {}
    where: Result = result.get("environment") or {}
    remarks = [f"{name_of(one)}: {text(reason)}" for one in methods for reason in one.get("fallbacks") or ()]
    remarks += [f"{name}: left out, {text(reason)}" for name, reason in (settings.get("left_out") or {}).items()]
    found = [
        sections.speed(methods, remarks),
        sections.latency(methods),
        sections.rounds(methods),
        sections.categories(result, methods),
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
    environment.filters |= {"short": short, "spread": spread, "name_of": name_of, "text": text}
    page = environment.get_template("page.html").render(
        where=where,
        fastest=_fastest(methods),
        doubts=(result.get("reliability") or {}).get("reasons") or (),
        environment={name: where[name] for name in (*_TOP, *where) if where.get(name) is not None or name not in _TOP},
        command=str(settings.get("command") or ""),
        sections=[section for section in found if section.plots or section.table],
        styles=method_styles(result),
        prompt=str(result.get("prompt") or ""),
        samples=samples,
        settings={str(name): value for name, value in settings.items() if name not in _ELSEWHERE},
    )
    written = Path(path)
    written.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")  # names of files may hold lone surrogates
    return written


def method_styles(result: Mapping[str, Any]) -> dict[str, int]:
    """Number of the colour and marker of each method; a verifier under drift has that of its method."""
    methods: list[Result] = result["methods"]
    styles = {name: index for index, name in enumerate(dict.fromkeys(map(name_of, methods)))}
    label = (result.get("settings") or {}).get("drift_num_assistant_tokens")
    for name in dict.fromkeys(row["verifier"] for row in result.get("drift") or ()):
        same = [name_of(one) for one in methods if name == (one.get("verifier") or one["name"])]
        exact = [one for one in same if label is not None and one.endswith(str(label))]
        styles.setdefault(name, styles[(exact or same)[0]] if same else len(styles))
    return styles


def _fastest(methods: list[Result]) -> Result | None:
    """The fastest lossless method that is not flagged as noise; None if there is only plain decoding."""
    found = [
        (speedup.middle, method)
        for method in methods
        if not method.get("is_lossy") and not method.get("is_noise")
        if str(method["name"]).partition(",")[0] != _PLAIN and (speedup := spread(method.get("speedup"))) is not None
    ]
    return max(found, key=itemgetter(0), default=(0.0, None))[1]
