"""Section of the results page with GPU measurements."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from _harness import markdown

FORMER, FOLDER = "first_light", "gpu"  # results of the former script and of `gpu.py`
PREFACE = (
    "An 8B target and a 1B draft in bfloat16, prompts of 512 tokens, {num_new} new tokens; an "
    "oracle accepts 0.8 of the drafted tokens."
)
Cell = dict[str, Any]


def summary(results: Path) -> str:
    """Return tokens per second of the default schedule and of plain decoding, as Markdown."""
    cells = [
        {"device": content["environment"]["device"], **cell}
        for path in sorted((results / FORMER).glob("*/end_to_end.json"))
        for content in [json.loads(path.read_text(encoding="utf-8"))]
        for cell in content["cells"]
        if cell["what"] == "end to end" and cell["method"] == "ours, default schedule"
    ]
    columns = {
        "GPU": lambda cell: cell["device"],
        "rows": lambda cell: cell["batch_size"],
        "plain, tokens/s": lambda cell: _rates(cell, "peer_tokens_per_s"),
        "hf_speculate, tokens/s": lambda cell: _rates(cell, "tokens_per_s"),
        "times plain": lambda cell: cell["ratio"],
    }
    return markdown(columns, cells)


def section(results: Path) -> list[str]:
    """Return Markdown lines with the tables of each run, runs of the former script first."""
    lines: list[str] = []
    runs = [
        path
        for folder in (FORMER, FOLDER)
        for path in sorted((results / folder).glob("*"))
        if path.is_dir()
    ]
    if not runs:
        return [*lines, "", "Not measured yet: `python benchmarks/gpu.py`."]
    for run in runs:
        contents = {
            path.stem: json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(run.glob("*.json"))
        }
        environment = next(iter(contents.values()))["environment"]
        versions = ", ".join(
            f"{name} {value}" for name, value in environment["versions"].items() if value
        )
        lines += [
            "",
            (
                f"`{run.parent.name}/{run.name}`: {environment['device']}, {environment['date']}, "
                "commit"
            ),
        ]
        lines[-1] += f" {environment['commit']}, {versions}."
        if run.parent.name == FOLDER:
            lines += tables(contents)
            continue
        cells = {name: content["cells"] for name, content in contents.items()}
        decoded = [cell for cell in cells.get("end_to_end", ()) if cell["what"] == "end to end"]
        kernels = [cell for cell in cells.get("kernel_times", ()) if cell["what"] == "kernel"]
        if decoded:
            lines += ["", PREFACE.format(num_new=64), "", markdown(DECODED, decoded)]
        if kernels:
            lines += [
                "",
                "The kernels and their references in torch, microseconds, V = 151,936, K = 5.",
                "",
            ]
            lines += [markdown(KERNELS, kernels)]
    return lines


def tables(contents: dict[str, dict[str, Any]]) -> list[str]:
    """Return Markdown lines for a run of `gpu.py`, given its parts by name."""
    cells = [cell for content in contents.values() for cell in content["cells"]]
    lines = [
        "",
        f"{PREFACE.format(num_new=256)} The bound: weights are read at the rate of a copy.",
    ]
    for what, columns in TABLES.items():
        shown = [cell for cell in cells if cell["what"] == what]
        if shown:
            lines += ["", markdown(columns, shown)]
    return lines


def _rates(cell: Cell, name: str) -> str | None:
    rates = cell.get(name)
    return f"{median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})" if rates else None


def _microseconds(name: str) -> Any:
    return lambda cell: None if cell[name] is None else f"{cell[name]:.1f}"


DECODED = {
    "method": lambda cell: cell["method"],
    "rows": lambda cell: cell["batch_size"],
    "tokens/s": lambda cell: _rates(cell, "tokens_per_s"),
    "alternating with": lambda cell: cell.get("peer"),
    "tokens/s of that": lambda cell: _rates(cell, "peer_tokens_per_s"),
    "ratio": lambda cell: cell.get("ratio"),
    "first call, seconds": lambda cell: cell["first_s"],
    "peak GB": lambda cell: cell["peak_gb"],
}
KERNELS = {
    "operation": lambda cell: cell["operation"],
    "rows": lambda cell: cell["batch_size"],
    "in a graph": _microseconds("us"),
    "reference in a graph": _microseconds("reference_us"),
    "launched by the host": _microseconds("eager_us"),
    "reference launched by the host": _microseconds("reference_eager_us"),
}


def _ms(kind: str) -> Any:
    return lambda cell: cell["ms"].get(kind)


def _us(name: str) -> Any:
    return lambda cell: f"{cell['us'][name]:.1f}"


TABLES: dict[str, dict[str, Any]] = {
    "end to end": {
        "method": lambda cell: cell["method"],
        "rows": lambda cell: cell["batch_size"],
        "tokens/s": lambda cell: _rates(cell, "tokens_per_s"),
        "after the prompt": lambda cell: _rates(cell, "tokens_per_s_after_prompt"),
        "of the bound": lambda cell: f"{cell['share_of_bound']:.0%}",
        "first call, seconds": lambda cell: cell["first_s"],
        "peak GB": lambda cell: cell["peak_gb"],
    },
    "round": {
        "ms a round, K = 5, rows": lambda cell: cell["batch_size"],
        **{kind: _ms(kind) for kind in ("weights", "attention", "small kernels", "idle")},
    },
    "attention": {
        "us of attention, rows": lambda cell: cell["batch_size"],
        "queries": lambda cell: cell["num_query"],
        "keys": lambda cell: cell["num_keys"],
        **{name: _us(name) for name in ("ours", "memory-efficient, masked", "flash, no mask")},
        "bound": lambda cell: f"{cell['bound_us']:.1f}",
    },
}
