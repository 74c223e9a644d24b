"""Write a benchmark's result as one self-contained HTML page."""

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hf_speculate.errors import ConfigError
from hf_speculate.stats import STAGES
from hf_speculate.tools.bench.report import plots, values
from hf_speculate.tools.bench.report.plots import Bar
from hf_speculate.tools.bench.report.values import Result, name_of, short, spread, text

_PLAIN = "plain"  # name of methods without drafts, up to the first comma
# settings shown elsewhere on the page
_ELSEWHERE = ("command", "drift_num_assistant_tokens", "left_out")
# values that describe the environment, in this order
_TOP = ("target", "draft", "device", "threads", "dtype", "date")


def write_html(result: Mapping[str, Any], path: Path) -> Path:
    """Write the JSON of `hf-speculate bench` as one page, without missing values.

    Returns:
        The path.

    Raises:
        ConfigError: the result has no methods.
    """
    methods: list[Result] = result.get("methods") or []
    if not methods:
        raise ConfigError(
            "result must have entries under 'methods', got none; pass the JSON of hf-speculate "
            "bench"
        )
    settings: Result = result.get("settings") or {}
    where: Result = result.get("environment") or {}
    names = {method["name"]: name_of(method) for method in methods}
    remarks = [
        f"{name_of(entry)}: {text(reason)}"
        for entry in methods
        for reason in entry.get("fallbacks") or ()
    ]
    remarks += [
        f"{name}: left out, {text(reason)}"
        for name, reason in (settings.get("left_out") or {}).items()
    ]
    timed = [entry for entry in methods if any((entry.get("seconds") or {}).values())]
    adaptive = [entry for entry in methods if entry.get("num_assistant_tokens") is None]
    samples: dict[str, list[str]] = {}  # text -> names of its methods
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
        plots=plots,
        tables=values,
        bars=_bars,
        methods=methods,
        names=list(names.values()),
        positions={
            name_of(entry): rates
            for entry in methods
            if (rates := entry.get("acceptance_rate_per_position"))
        },
        lens={
            name_of(entry): lens
            for entry in adaptive
            if len(set(lens := entry.get("draft_lens") or ())) > 1
        },
        stages=STAGES,
        seconds={
            name_of(entry): [entry["seconds"].get(stage, 0.0) for stage in STAGES]
            for entry in timed
        },
        categories=[
            {**entry, "method": names[entry["method"]]} for entry in result.get("categories") or []
        ],
        drift=result.get("drift") or [],
        drift_len=settings.get("drift_num_assistant_tokens"),
        remarks=remarks,
        where=where,
        fastest=_fastest(methods),
        doubts=(result.get("reliability") or {}).get("reasons") or (),
        environment={
            name: where[name]
            for name in (*_TOP, *where)
            if where.get(name) is not None or name not in _TOP
        },
        command=str(settings.get("command") or ""),
        styles=method_styles(result),
        prompt=str(result.get("prompt") or ""),
        samples=samples,
        settings={str(name): value for name, value in settings.items() if name not in _ELSEWHERE},
    )
    # file names may contain lone surrogates
    path.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return path


def method_styles(result: Mapping[str, Any]) -> dict[str, int]:
    """Assign an index for colour and marker to each method.

    Verifiers in the drift plots share the index of their method.
    """
    methods: list[Result] = result["methods"]
    styles = {name: index for index, name in enumerate(dict.fromkeys(map(name_of, methods)))}
    label = (result.get("settings") or {}).get("drift_num_assistant_tokens")
    for name in dict.fromkeys(row["verifier"] for row in result.get("drift") or ()):
        same_verifier = [
            name_of(entry) for entry in methods if name == (entry.get("verifier") or entry["name"])
        ]
        same_len = [
            entry for entry in same_verifier if label is not None and entry.endswith(str(label))
        ]
        styles.setdefault(
            name, styles[(same_len or same_verifier)[0]] if same_verifier else len(styles)
        )
    return styles


def _fastest(methods: list[Result]) -> Result | None:
    """Find the fastest lossless method not flagged as noise; None with plain decoding only."""
    candidates = [
        (speedup.middle, method)
        for method in methods
        if not method.get("is_lossy") and not method.get("is_noise")
        if str(method["name"]).partition(",")[0] != _PLAIN
        and (speedup := spread(method.get("speedup"))) is not None
    ]
    return max(candidates, key=itemgetter(0), default=(0.0, None))[1]


def _bars(methods: list[Result], field: str, factor: float = 1.0) -> list[Bar]:
    spreads = [(method, spread(method.get(field), factor)) for method in methods]
    return [
        Bar(name_of(entry), value, bool(entry.get("is_lossy")))
        for entry, value in spreads
        if value is not None
    ]
