"""Write the results pages from the JSON under `benchmarks/results/`.

python benchmarks/results_page.py

Nothing is measured. `benchmarks/RESULTS.md` has six tables and the missed targets, and
`docs/results/` has a page per benchmark.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import _gpu_page
import acceptance
import compilation
import drafters
import end_to_end
import fitted_heads
import grammar_drafts
import hybrids
import memory
import never_slower
import overhead
import prefill_chunks
import readme_tables
import real_models
import revisions
import round_counts
import row_memory
import scaling
import suffix
import ten_tasks
import throughput
import warpers
from _harness import RESULTS, ROOT, markdown, read_results
from _report import as_table

import heads

PAGE = ROOT / "benchmarks" / "RESULTS.md"
PAGES = ROOT / "docs" / "results"
GPU_PAGE = "gpu"
Content = dict[str, Any]


class Section(NamedTuple):
    """Benchmark with its own page."""

    title: str
    name: str
    table: Callable[[Content], str]

    @property
    def file(self) -> str:
        return f"{self.name}.md"


SECTIONS = (
    Section("End to end", end_to_end.NAME, end_to_end.table),
    Section("Never slower", never_slower.NAME, never_slower.table),
    Section("Real models", real_models.NAME, real_models.table),
    Section("Ten tasks", ten_tasks.NAME, ten_tasks.table),
    Section("Drafts of forced text", grammar_drafts.NAME, grammar_drafts.table),
    Section("Scaling", scaling.NAME, scaling.table),
    Section("Overhead", overhead.NAME, overhead.table),
    Section("Counts of a round on a GPU", round_counts.NAME, round_counts.table),
    Section("Memory", memory.NAME, memory.table),
    Section("Verifiers", "verifiers", as_table),
    Section("Top-k and top-p on a CPU", warpers.NAME, warpers.table),
    Section("Acceptance", "acceptance", acceptance.table),
    Section("Throughput of a data set", throughput.NAME, throughput.table),
    Section("Throughput with a draft head", throughput.result_of("head"), throughput.table),
    Section("Throughput of a hybrid model", throughput.result_of("hybrid"), throughput.table),
    Section("Memory of 10,000 rows", row_memory.NAME, row_memory.table),
    Section("Long prompts beside other rows", prefill_chunks.NAME, prefill_chunks.table),
    Section("Drafts without a model", suffix.NAME, suffix.table),
    Section("A draft model and prompt lookup together", drafters.NAME, drafters.table),
    Section("Draft heads of real shape", heads.NAME, heads.table),
    Section("Fitted draft heads", fitted_heads.NAME, fitted_heads.table),
    Section("Recurrent layers", hybrids.NAME, hybrids.table),
    Section("Compilation", compilation.NAME, compilation.table),
    Section("Before and after a change", revisions.NAME, revisions.table),
)


class Aim(NamedTuple):
    """Target of the project, with its measured figure."""

    figure: str
    goal: float
    measured: float | None
    bound_by: str
    at_most: bool = False

    @property
    def is_missed(self) -> bool:
        if self.measured is None:
            return False
        return self.measured > self.goal if self.at_most else self.measured < self.goal

    @property
    def line(self) -> str:
        word = "at most" if self.at_most else "at least"
        return f"- {self.figure}: {self.measured:.2f}, aim {word} {self.goal:.2f}. {self.bound_by}"


def aims(folder: Path) -> Iterator[Aim]:
    """Iterate over the project targets for the results in a folder."""
    pair = readme_tables.cells_of(read_results(end_to_end.NAME, folder))
    for rows, goal, bound_by in (
        (1, 1.05, "Nine tenths of a round are forwards, equal on both sides."),
        (8, 4.0, "A batch ends with its slowest row."),
    ):
        peers = [
            row["tokens_per_s"]
            for (method, *cell), row in pair.items()
            if cell == [rows, "greedy"]
            and method.startswith("transformers")
            and not row["is_compiled"]
        ]
        ours = pair["ours, adaptive", rows, "greedy"]["tokens_per_s"]
        figure = f"bundled pair, {rows} row{'s' * (rows > 1)}, default over transformers' best"
        yield Aim(figure, goal, ours / max(peers), bound_by)
        constants = [
            pair[f"ours, K = {num}", rows, "greedy"]["tokens_per_s"]
            for num in readme_tables.LENGTHS
            if (f"ours, K = {num}", rows, "greedy") in pair
        ]
        figure = f"bundled pair, {rows} row{'s' * (rows > 1)}, default over the best constant K"
        bound_by = "The schedule tries lengths out, which costs a share of a short call."
        yield Aim(figure, 0.97, ours / max(constants), bound_by)
    for num_tokens, means in ten_tasks.means_of(read_results(ten_tasks.NAME, folder)["rows"]):
        peer = max(means[name] for name in ten_tasks.PEERS)
        figure = f"ten tasks, {num_tokens} tokens, default over transformers' better setting"
        yield Aim(figure, 1.03, means["ours, lookup"] / peer, "Short calls have few rounds.")
        figure = f"ten tasks, {num_tokens} tokens, head with lookup over lookup alone"
        share = means["ours, head with lookup"] / means["ours, lookup"]
        yield Aim(figure, 0.97, share, "A step of the head costs more than it gains in float32.")
    defaults = never_slower.defaults_of(read_results(never_slower.NAME, folder))
    worst = min(row["over_plain"]["median"] for row in defaults)
    bound_by = "Trials of the draft and, under sampling, noise of our own."
    yield Aim("never slower, worst cell over plain decoding", 0.97, worst, bound_by)
    ours = [
        row
        for row in read_results(compilation.NAME, folder)["rows"]
        if row["method"] != compilation.METHODS["plain"].name
    ]
    cold = [row["compile_s"]["median"] for row in ours if row["caches"] == compilation.EMPTY]
    bound_by = "A single row is a case of its own for torch.compile: each model has two graphs."
    yield Aim("seconds to compile, several rows and one", 60, max(cold), bound_by, at_most=True)


def useless_table(folder: Path) -> str:
    """Tabulate the speed with drafts that gain nothing as Markdown, by draft and number of rows."""
    rows = []
    cells = never_slower.defaults_of(read_results(never_slower.NAME, folder))
    words = {"random": "a random model of the draft's size", "large": "a copy of the target"}
    for draft, batch_size in sorted({(row["draft"], row["batch_size"]) for row in cells}):
        medians = [
            row["over_plain"]["median"]
            for row in cells
            if (row["draft"], row["batch_size"]) == (draft, batch_size)
        ]
        if draft in words:
            rows.append((words[draft], batch_size, medians))
    columns = {
        "draft": lambda row: row[0],
        "rows": lambda row: row[1],
        "cells": lambda row: len(row[2]),
        "times plain, medians": lambda row: f"{min(row[2]):.2f} to {max(row[2]):.2f}",
    }
    return markdown(columns, rows)


def origin(content: Content) -> str:
    """Return the machine, versions, commit and date of a result."""
    of = content["environment"]
    is_cpu = "cuda" not in content["arguments"].get("device", "cpu")
    threads = f", {of['threads']} thread{'s' * (of['threads'] > 1)}" if is_cpu else ""
    numbers = of["versions"]
    versions = "torch {torch}, transformers {transformers}, Python {python}".format(**numbers)
    left_out = content["arguments"].get("left_out")
    note = f" Left out, for want of time: {'; '.join(left_out)}." if left_out else ""
    repeats = content["arguments"].get("repeats")
    note += f" Runs of each method on each input: {repeats}." if repeats else ""
    earlier: dict[str, dict[str, None]] = {}  # unique cells by source
    for row in content["rows"]:
        if "earlier" in row:
            earlier.setdefault(row["earlier"]["source"], {})[row["earlier"]["cell"]] = None
    for source, cells in earlier.items():
        note += f" Measured earlier ({source}): {'; '.join(cells)}."
    return f"{of['device']}{threads}; {versions}; commit {of['commit']}; {of['date']}.{note}"


def find(name: str, folder: Path) -> list[tuple[str, Content]]:
    """Return the results of a benchmark on CPUs and GPUs, by file name."""
    files = [f"{name}{end}" for end in ("", "_cuda") if (folder / f"{name}{end}.json").exists()]
    return [(file, read_results(file, folder)) for file in files]


def section_page(section: Section, folder: Path) -> str:
    """Return the page for one benchmark."""
    parts = [f"# {section.title}"]
    results = find(section.name, folder)
    if not results:
        parts += ["", f"Not measured yet: `python benchmarks/{section.name}.py`."]
    for file, content in results:
        parts += ["", origin(content), "", section.table(content).strip()]
        if (folder / f"{file}.png").exists():
            parts += ["", f"![{section.title}](../../benchmarks/results/{file}.png)"]
    return "\n".join([*parts, ""])


def summary_page(folder: Path) -> str:
    """Return the page with six tables, missed targets and links."""
    tasks, pair = read_results(ten_tasks.NAME, folder), read_results(end_to_end.NAME, folder)
    data_set = read_results(throughput.NAME, folder)
    fitted = read_results(fitted_heads.NAME, folder)
    slower = read_results(never_slower.NAME, folder)
    missed = [aim.line for aim in aims(folder) if aim.is_missed]
    parts = [
        "# Results",
        (
            "Written by `python benchmarks/results_page.py` from the JSON in "
            "`benchmarks/results/`. Every text is compared with plain decoding's before it is "
            "timed."
        ),
        "## Prompt lookup on a real model",
        (
            "SmolLM2-135M-Instruct, greedy, one row, float32. Speed over plain `generate()`: "
            "medians (and ranges) over tasks. [All tasks](../docs/results/ten_tasks.md)."
        ),
        readme_tables.tasks_table(tasks),
        origin(tasks),
        "## A draft model, in one row and in batches",
        (
            "The bundled pair in float32, median speed over plain `generate()`; K is 3, 5 or 8. "
            "[All methods](../docs/results/end_to_end.md)."
        ),
        readme_tables.comparison_table(readme_tables.cells_of(pair)),
        origin(pair),
        "## Drafts that gain nothing",
        (
            "The default schedule with drafts of which nothing is accepted, or that cost as much "
            "as the target. [All cells](../docs/results/never_slower.md)."
        ),
        useless_table(folder),
        origin({**slower, "rows": []}),  # the benchmark's page lists cells measured earlier
        "## Draft heads",
        "The bundled heads on the bundled target.",
        fitted_heads.table(fitted).strip(),
        origin(fitted),
        "## Data sets",
        (
            "40 prompts with outputs of long-tailed lengths, eight rows at a time. "
            "[With a head](../docs/results/throughput_head.md), "
            "[of a hybrid](../docs/results/throughput_hybrid.md)."
        ),
        throughput.table(data_set).strip(),
        origin(data_set),
        "## GPUs",
        (
            "An 8B target with a 1B draft (random weights, four in five drafted tokens accepted), "
            "bfloat16, the default schedule from CUDA graphs. [All runs](../docs/results/gpu.md)."
        ),
        _gpu_page.summary(folder),
        "## Missed aims",
        "\n".join(missed) if missed else "None.",
        "## Pages",
        "\n".join(f"- [{section.title}](../docs/results/{section.file})" for section in SECTIONS),
    ]
    return "\n\n".join(parts) + "\n"


def pages(folder: Path) -> dict[Path, str]:
    """Return all results pages, by path."""
    gpu = "\n".join(["# On a GPU", *_gpu_page.section(folder)]) + "\n"
    written = {PAGE: summary_page(folder), PAGES / f"{GPU_PAGE}.md": gpu}
    return written | {PAGES / each.file: section_page(each, folder) for each in SECTIONS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that holds the JSON")
    args = parser.parse_args()
    PAGES.mkdir(exist_ok=True)
    for path, content in pages(args.results).items():
        path.write_text(content, encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)} and {PAGES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
