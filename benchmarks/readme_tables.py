"""Write the speed tables in the README and docs from benchmark JSON; nothing is measured.

python benchmarks/readme_tables.py
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grammar_drafts
import ten_tasks
from _harness import ROOT, markdown, read_results, write_between

COLUMNS = {
    "1 row, greedy": (1, "greedy"),
    "8 rows, greedy": (8, "greedy"),
    "1 row, sampling": (1, "sampling"),
    "8 rows, sampling": (8, "sampling"),
}
BEST = "best K"  # denotes the fastest constant K
# Name on the page -> method in the JSON.
COMPARED = {
    "transformers, default": "transformers, defaults",
    "transformers, best constant K": f"transformers, {BEST}",
    "hf_speculate, default": "ours, adaptive",
    "hf_speculate, best constant K": f"ours, {BEST}",
    "transformers, best constant K, compiled": f"transformers, {BEST}, compiled",
    "hf_speculate, default, compiled": "ours, adaptive, compiled",
    "plain, compiled": "plain, compiled",
}
LENGTHS = (3, 5, 8)
TASK_METHODS = {
    "transformers, K = 5": "transformers, 5",
    "transformers, K = 10": "transformers, 10",
    "hf_speculate, default": "ours, lookup",
}
_UNMEASURED = "no figure here"
TASK_KINDS = {"copying": "7 tasks that copy", "plain": "3 questions"}

Cells = dict[tuple[str, int, str], dict[str, Any]]


def cells_of(results: dict[str, Any]) -> Cells:
    """Return the rows of the bundled pair in float32, by method, number of rows and mode."""
    return {
        (row["method"], row["batch_size"], row["mode"]): row
        for row in results["rows"]
        if (row["verifier"], row["subject"], row["dtype"]) == (None, "pair", "float32")
    }


def comparison_table(cells: Cells, has_compiled: bool = True) -> str:
    """Tabulate median speed-ups of the defaults, the best constant K, and compiled methods."""

    def shown(method: str, column: tuple[int, str]) -> str | None:
        names = {method.replace(BEST, f"K = {num}") for num in LENGTHS}
        speedups = [
            cells[(name, *column)]["over_plain"]["median"]
            for name in names
            if (name, *column) in cells
        ]
        return f"{max(speedups):.2f}x" if speedups else None

    rows = [
        {"method": name} | {head: shown(of, COLUMNS[head]) for head in COLUMNS}
        for name, of in COMPARED.items()
        if has_compiled or "compiled" not in name
    ]
    measured = [row for row in rows if any(row[head] for head in COLUMNS)]
    return markdown(
        {head: lambda row, head=head: row[head] for head in ("method", *COLUMNS)}, measured
    )


def tasks_table(results: dict[str, Any]) -> str:
    """Tabulate medians and ranges over the ten tasks, by number of new tokens and kind."""
    lengths = sorted({row["max_new_tokens"] for row in results["rows"]})
    columns: dict[str, Any] = {"prompt lookup": lambda row: row[0]}
    for length in lengths:
        for kind, words in TASK_KINDS.items():
            spreads = ten_tasks.spreads_of(results["rows"], length, kind)
            columns[f"{words}, {length} tokens"] = lambda row, spreads=spreads: (
                "{:.2f}x ({:.2f} to {:.2f})".format(*spreads[row[1]])
            )
    return markdown(columns, TASK_METHODS.items())


def sources_table() -> str:
    """Tabulate the draft sources with one figure each."""
    tasks = read_results(ten_tasks.NAME)["rows"]
    lookup, *_ = ten_tasks.spreads_of(
        tasks, max(row["max_new_tokens"] for row in tasks), "copying"
    )["ours, lookup"]
    pair = cells_of(read_results("end_to_end"))["ours, adaptive", 1, "greedy"]
    (head,) = [row for row in read_results("fitted_heads")["rows"] if row["draft"] == "EAGLE-3"]
    forced = grammar_drafts.tokens_per_forward(read_results(grammar_drafts.NAME)["rows"], "grammar")
    rows = [
        (
            "`prompt_lookup_num_tokens`",
            "earlier text of the row; [stores](docs/drafts.md) add other texts",
            f"SmolLM2, tasks that copy: {lookup:.2f}x",
        ),
        (
            "`assistant_model`",
            "a smaller model, with the same or an overlapping vocabulary",
            f"bundled pair: {pair['over_plain']['median']:.2f}x",
        ),
        (
            "`assistant_model`",
            (
                "a [draft head](docs/heads.md): EAGLE-3, P-EAGLE, DFlash, DFlash 2, DSpark, PARD, "
                "MTP layers, Gemma 4 assistants"
            ),
            f"bundled EAGLE-3 head: {head['greedy']:.1f} tokens per forward (plain: 1)",
        ),
        ("`assistant_early_exit`", "the first layers of the model", _UNMEASURED),
        (
            "`assistant_model=UnoAdapter(...)`",
            "the model itself with a [Uno adapter](docs/heads.md#uno-adapters), a LoRA",
            _UNMEASURED,
        ),
        (
            "`grammar_draft`",
            "text that a [grammar](docs/drafts.md#forced-text) forces: JSON, tool calls",
            f"SmolLM2, 30 schemas: {forced:.1f} tokens per forward (plain: 1)",
        ),
        (
            "`drafter`, `candidate_generator`",
            "[your own code](docs/extending.md#a-drafter)",
            _UNMEASURED,
        ),
    ]
    columns = ("argument of `enable()` or `generate()`", "what drafts", "measured")
    return markdown(
        {head: lambda row, place=place: row[place] for place, head in enumerate(columns)}, rows
    )


def origin(results: dict[str, Any]) -> str:
    """Return the machine, versions and commit of the results."""
    environment = results["environment"]
    versions = "torch {torch} and transformers {transformers}".format(**environment["versions"])
    cores = f"{environment['threads']} core{'s' * (environment['threads'] > 1)}"
    commit = environment["commit"]
    return f"Measured on {cores} of an {environment['device']} with {versions}, commit {commit}."


def parts() -> dict[str, str]:
    """Return the content for each marked section of the pages, by name."""
    tasks, pair = read_results(ten_tasks.NAME), read_results("end_to_end")
    return {
        "sources": sources_table(),
        "tasks": f"{tasks_table(tasks)}\n\n{origin(tasks)}",
        "comparison": f"{comparison_table(cells_of(pair), has_compiled=False)}\n\n{origin(pair)}",
    }


PAGES = {"README.md": ("comparison", "sources"), "docs/index.md": ("tasks",)}


def write_pages(root: Path, names: Iterable[str] = PAGES) -> None:
    """Fill the marked sections of the pages under `root`."""
    written = parts()
    for page in names:
        for name in PAGES[page]:
            write_between(root / page, name, written[name])


if __name__ == "__main__":
    write_pages(ROOT)
    print(f"written: {', '.join(PAGES)}")
