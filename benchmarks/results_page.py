"""Write `benchmarks/RESULTS.md` from the JSON under `benchmarks/results/`, without measuring.

python benchmarks/results_page.py
"""

import argparse
from collections.abc import Callable, Iterable
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
import real_models
import revisions
import round_counts
import row_memory
import scaling
import suffix
import ten_tasks
import throughput
import warpers
from _harness import RESULTS, ROOT, markdown, read_results, source_hash
from _real_cells import CELLS, HOLDS_AT
from _report import as_table

import heads

PAGE = ROOT / "benchmarks" / "RESULTS.md"
Row = dict[str, Any]


class Section(NamedTuple):
    """One benchmark on the page."""

    title: str
    name: str
    table: Callable[[Row], str]


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
CONSTANT_K = 5  # K of the constant schedule; it has the targets of the default one
# Reasons for missed targets. The first key found in a figure's words applies.
BOUNDS = {
    "several rows and for one": (
        "torch.compile specialises on a single row, so each model has two graphs"
    ),
    "refilled rows": (
        "target and draft read each prompt separately, after preparation on the host"
    ),
    "real models": "trials of the draft, and other programs on the machine",
    "never_slower": (
        "trials of the draft, row-wise noise for sampling, and masks for rows of unequal length"
    ),
    "looped over rows": (
        "a batch ends with its slowest row, and verifying 8 rows costs more than a plain step of 8"
    ),
    "over transformers' assisted": (
        "forwards take nine tenths of a round, and both sides run the same ones"
    ),
    "verify factor": "float32 products of 48 query rows; three runs gave 1.58, 1.66 and 1.81",
    "bookkeeping": (
        "sampling: drawing drafts and warping K+1 rows pass over the vocabulary, and the target is "
        "small"
    ),
    "drafts without a model": (
        "lists and tensors are passed once a round; a single row pays for it alone"
    ),
    "forwards per token": (
        "both together also run the draft model; prompt lookup alone needs no forwards of it"
    ),
    "best constant": (
        "a first call tries out lengths, estimates lag behind a rising acceptance rate, and "
        "sampling is random"
    ),
    "bound": "as efficiency; the default schedule also tries out lengths in a short call",
    "efficiency": (
        "forwards take longer in a call than alone, and a round has overhead besides them"
    ),
    "B=1": "two models read the prompt, and a round has overhead besides its forwards",
    "speed over plain": (
        "a batch ends with its slowest row: rounds of few rows cost nearly as much as rounds of 8"
    ),
}
SUFFIX_US = {"": "us_per_row_and_round", ", the index alone": "us_of_the_index"}
DEVICES = ("", "_cuda")  # suffixes of the results of a CPU and of a GPU


class Target(NamedTuple):
    """One line of the table of targets."""

    figure: str
    goal: str  # in words
    measured: str
    is_reached: bool | None  # None: not measured, or not applicable


class Goals(NamedTuple):
    """Goals for a number of rows."""

    assisted: float  # speed over transformers' assisted generation
    share: float  # share of the pair's bound
    plain: float  # speed over plain decoding if the pair's bound is at least `least_bound`
    least_bound: float
    efficiency: float


def find(name: str, folder: Path) -> list[tuple[str, Row]]:
    """Read the results of a benchmark by file name; results of former forms are left out."""
    files = [f"{name}{ending}" for ending in DEVICES if (folder / f"{name}{ending}.json").exists()]
    contents = [(file, read_results(file, folder)) for file in files]
    has_methods = name in {end_to_end.NAME, never_slower.NAME, memory.NAME}
    return [
        (file, content)
        for file, content in contents
        if content["rows"] and (not has_methods or "method" in content["rows"][0])
    ]


def line(
    figure: str,
    goal: float,
    values: Iterable[float | None],
    at_most: bool = False,
    shown: str = "{:.2f}",
) -> Target:
    """Compare the worst of the values with a goal."""
    known = [value for value in values if value is not None]
    word = "at most" if at_most else "at least"
    if not known:
        return Target(figure, f"{word} {shown.format(goal)}", "not measured", None)
    worst = max(known) if at_most else min(known)
    return Target(
        figure,
        f"{word} {shown.format(goal)}",
        shown.format(worst),
        worst <= goal if at_most else worst >= goal,
    )


def cells_of(rows: list[Row], batch_size: int) -> list[list[Row]]:
    """Group the greedy rows with this batch size by pair, dtype and acceptance."""
    cells: dict[Any, list[Row]] = {}
    for row in rows:
        if row["batch_size"] == batch_size and row["mode"] == "greedy":
            cells.setdefault((row["subject"], row["dtype"], row["oracle_acceptance"]), []).append(
                row
            )
    return list(cells.values())


def over_assisted(cell: list[Row], ours: Row) -> float | None:
    """Return our tokens per second over transformers' best assisted generation.

    Compiled rivals count only for a compiled method of ours.
    """
    rivals = [row for row in cell if row["method"].startswith("transformers")]
    theirs = [
        row["tokens_per_s"] for row in rivals if ours and row["is_compiled"] <= ours["is_compiled"]
    ]
    return ours["tokens_per_s"] / max(theirs) if theirs else None


def over_compiled_plain(cell: list[Row], ours: Row) -> float | None:
    """Return our tokens per second over compiled plain decoding."""
    theirs = [row["tokens_per_s"] for row in cell if row["engine"] == "plain" and ran_compiled(row)]
    return ours["tokens_per_s"] / theirs[0] if ours and theirs else None


def default_of(cell: list[Row]) -> Row:
    """Return the row of our eager default schedule, or an empty one if it was not measured."""
    return way_of(cell, None, is_compiled=False)


def way_of(cell: list[Row], num_assistant_tokens: int | None, *, is_compiled: bool) -> Row:
    """Return the row of ours with this K and the mode's verifier.

    It is empty if none was measured or compilation fell back to eager forwards.
    """
    ours = [row for row in cell if row["engine"] == "ours" and row["verifier"] is None]
    ours = [row for row in ours if row["num_assistant_tokens"] == num_assistant_tokens]
    return next(
        (row for row in ours if (ran_compiled(row) if is_compiled else not row.get("is_compiled"))),
        {},
    )


def ran_compiled(row: Row) -> bool:
    return bool(row.get("is_compiled")) and not row["fell_back"]


def end_to_end_targets(rows: list[Row], where: str) -> list[Target]:
    """Return lines for every measured pair."""
    lines = []
    goals = {1: Goals(1.5, 0.93, 1.7, 1.85, 0.95), 8: Goals(4.0, 0.90, 1.5, 1.7, 0.90)}
    for batch_size, goal in goals.items():
        for cell in cells_of(rows, batch_size) or [[]]:
            pair = f", {cell[0]['subject']}, {cell[0]['dtype']}" if cell else ""
            for draft_len in (None, CONSTANT_K):
                for is_compiled in (False, True):
                    schedule = "default schedule" if draft_len is None else f"K = {draft_len}"
                    method = f"B={batch_size} greedy{pair}{where}, {schedule}"
                    method += ", compiled" * is_compiled
                    ours = way_of(cell, draft_len, is_compiled=is_compiled)
                    lines += lines_of(method, cell, ours, goal, is_looped=batch_size > 1)
    return lines


def lines_of(
    method: str, cell: list[Row], ours: Row, goal: Goals, *, is_looped: bool
) -> list[Target]:
    """Return the targets of one of our methods.

    Efficiency and the pair's bound are those of eager forwards.
    """
    peer = f"assisted{' looped over rows' * is_looped} (best of its K and its defaults)"
    over_plain = ours["over_plain"]["median"] if ours else None
    candidates = [
        line(
            f"{method}: speed over transformers' {peer}", goal.assisted, [over_assisted(cell, ours)]
        ),
        line(f"{method}: speed over plain", goal.plain, [over_plain]),
    ]
    if ours and ours["bound"] < goal.least_bound:
        words = (
            f"{candidates[1].goal}, where the pair's bound is {goal.least_bound:.2f} or more: it "
            f"is {ours['bound']:.2f}"
        )
        candidates[1] = candidates[1]._replace(goal=words, is_reached=None)
    if "compiled" in method:
        return [
            *candidates,
            line(f"{method}: speed over plain, compiled", 1.0, [over_compiled_plain(cell, ours)]),
        ]
    candidates.append(
        line(f"{method}: share of the pair's bound", goal.share, [ours.get("share_of_bound")])
    )
    return [*candidates, line(f"{method}: efficiency", goal.efficiency, [ours.get("efficiency")])]


def never_slower_targets(rows: list[Row], where: str) -> list[Target]:
    defaults = never_slower.defaults_of({"rows": rows})
    worst = [row["over_plain"]["median"] for row in defaults]
    gaining = [
        never_slower.share_of_best(row)
        for row in defaults
        if (row["best_constant_over_plain"] or 0.0) >= 1.1
    ]
    return [
        line(f"worst cell of never_slower: speed over plain{where}", 0.97, worst, shown="{:.3f}"),
        line(
            f"default schedule over the best constant K, worst cell where that gains 1.1{where}",
            0.97,
            gaining,
        ),
    ]


def real_models_targets(rows: list[Row], where: str) -> list[Target]:
    """Return the upper ends of the cells' intervals, and the mean of useless drafts."""
    highest = [row["over_plain"]["high"] for row in rows]
    if rows and len(rows) < len(CELLS):
        where = f"{where}, {len(rows)} of {len(CELLS)} cells"
    return [
        line(
            f"real models: upper end of the 95 % interval over plain, worst cell{where}",
            HOLDS_AT,
            highest,
        ),
        line(
            f"real models: geometric mean over plain with useless drafts{where}",
            real_models.USELESS_GOAL,
            [real_models.useless_mean(rows)],
            shown="{:.3f}",
        ),
    ]


def scaling_targets(rows: list[Row], where: str) -> list[Target]:
    factors = [
        row
        for row in rows
        if row["varies"] == "verify" and (row["batch_size"], row["context"]) == (8, 2048)
    ]
    at_8k = [row for row in rows if row["context"] == 8192 and row["varies"] != "verify"]
    longest = [row for row in at_8k if row["layers"] == max(row["layers"] for row in at_8k)]
    theirs = [row["tokens_per_s"] for row in longest if row["method"].startswith("transformers")]
    over = default_of(longest)["tokens_per_s"] / max(theirs) if theirs else None
    return [
        line(
            f"verify factor v(6), 8 rows, 2k context{where}",
            1.6,
            [row["v"]["ours"] for row in factors],
            True,
        ),
        line(f"tokens/s at 8k context, B=1, over transformers' assisted{where}", 1.8, [over]),
    ]


def overhead_targets(rows: list[Row], where: str) -> list[Target]:
    shares = [max(row["share_inside"], row["share_outside"]["median"]) for row in rows]
    return [
        line(
            f"bookkeeping and verification in a round, the larger view{where}",
            0.05,
            shares,
            True,
            "{:.1%}",
        )
    ]


def memory_targets(rows: list[Row], where: str) -> list[Target]:
    ratios = [row["over_allowed"] for row in rows]
    return [
        line(f"peak memory over plain's with the draft and its cache{where}", 1.05, ratios, True)
    ]


def suffix_targets(rows: list[Row], where: str) -> list[Target]:
    figure, targets = "drafts without a model: microseconds per row and round", []
    for row in rows:
        if row["length"] != suffix.TARGET_LEN:
            continue
        place = f"at {suffix.TARGET_LEN} tokens, B={row['batch_size']}{where}"
        for suffix_name, name in SUFFIX_US.items():
            targets.append(
                line(
                    f"{figure}{suffix_name} {place}",
                    suffix.MAX_US,
                    [row[name]["median"]],
                    True,
                    "{:.0f}",
                )
            )
    growth = line(
        f"drafts without a model: growth with the text{where}",
        suffix.MAX_GROWTH,
        suffix.growths(rows),
        True,
    )
    return [*targets, growth]


def drafters_targets(rows: list[Row], where: str) -> list[Target]:
    greedy = [row for row in rows if row["mode"] == "greedy"]
    figure = "prompt lookup and draft model over the better of the two"
    return [
        line(
            f"{figure}, mean acceptance length, worst category{where}",
            1.0,
            drafters.over_better(greedy),
        ),
        line(
            f"{figure}, forwards per token, worst category{where}",
            1.0,
            drafters.cost_over_better(greedy),
            True,
        ),
    ]


def compilation_targets(rows: list[Row], where: str) -> list[Target]:
    ours = [row for row in rows if row["method"] != compilation.METHODS["plain"].name]
    cold = [row for row in ours if row["caches"] == compilation.EMPTY]
    warm = [row for row in ours if row["caches"] == compilation.FILLED]
    figure, totals = (
        "first compiled call, seconds to compile",
        [row["compile_s"]["median"] for row in cold],
    )
    return [
        line(f"{figure}{where}", 60.0, [row["first_s"] for row in cold], True, "{:.1f}"),
        line(
            f"seconds to compile for several rows and for one{where}", 60.0, totals, True, "{:.1f}"
        ),
        line(
            f"{figure}, with caches on disk{where}",
            15.0,
            [row["first_s"] for row in warm],
            True,
            "{:.1f}",
        ),
        line(
            f"graphs of all compiled calls{where}",
            4,
            [row["graphs_after"] for row in ours],
            True,
            "{:.0f}",
        ),
    ]


def revisions_targets(rows: list[Row], where: str) -> list[Target]:
    figure = (
        f"greedy call with K = 5, median over that of {rows[0]['old']}"
        if rows
        else "greedy call, new over old"
    )
    return [line(f"{figure}{where}", 1.02, [row["new_over_old"] for row in rows], True, "{:.3f}")]


def heads_targets(rows: list[Row], where: str) -> list[Target]:
    return [
        line(
            f"drafting with an EAGLE-3 head over its products alone{where}",
            heads.GOAL,
            heads.ratios_of(rows),
            True,
        )
    ]


def throughput_targets(rows: list[Row], where: str) -> list[Target]:
    figure = "refilled rows with speculation over"
    refill = {
        row["method"]: row["refill_is_faster"]["median"] for row in rows if "failure" not in row
    }
    return [
        line(f"{figure} {name}{where}", goal, [refill[name]] if name in refill else [])
        for name, goal in throughput.TARGETS.items()
    ]


TARGETS = {
    end_to_end.NAME: end_to_end_targets,
    overhead.NAME: overhead_targets,
    never_slower.NAME: never_slower_targets,
    real_models.NAME: real_models_targets,
    scaling.NAME: scaling_targets,
    memory.NAME: memory_targets,
    throughput.NAME: throughput_targets,
    suffix.NAME: suffix_targets,
    drafters.NAME: drafters_targets,
    heads.NAME: heads_targets,
    compilation.NAME: compilation_targets,
    revisions.NAME: revisions_targets,
}
TARGET_COLUMNS = {
    "figure": lambda row: row.figure,
    "at least / at most": lambda row: row.goal,
    "measured": lambda row: row.measured,
    "reached": lambda row: None if row.is_reached is None else "yes" if row.is_reached else "no",
    "bounded by": lambda row: bound_of(row) if row.is_reached is False else None,
}


def bound_of(target: Target) -> str | None:
    return next((words for key, words in BOUNDS.items() if key in target.figure), None)


def targets(folder: Path) -> str:
    """Format every target by device."""
    lines = []
    for name, make in TARGETS.items():
        results = find(name, folder) or [("", {"rows": []})]
        for file, content in results:
            lines += make(content["rows"], ", GPU" if file.endswith("_cuda") else "")
    return markdown(TARGET_COLUMNS, lines)


def origin(content: Row) -> str:
    """Describe the measurement of a result."""
    environment = content["environment"]
    threads = (
        ""
        if "cuda" in content["arguments"].get("device", "cpu")
        else f", {environment['threads']} threads"
    )
    numbers = environment["versions"]
    versions = f"torch {numbers['torch']}, transformers {numbers['transformers']}"
    versions += f", Python {numbers['python']}"
    left_out = content["arguments"].get("left_out")
    note = f" Left out, for want of time: {'; '.join(left_out)}." if left_out else ""
    repeats = content["arguments"].get("repeats")
    note += f" Runs of each method on each input: {repeats}." if repeats else ""
    earlier: dict[str, dict[str, None]] = {}  # cells by their source, each once
    for row in content["rows"]:
        if "earlier" in row:
            earlier.setdefault(row["earlier"]["source"], {})[row["earlier"]["cell"]] = None
    for source, cells in earlier.items():
        note += f" Measured earlier ({source}): {'; '.join(cells)}."
    sources = f" (sources {environment['sources']})" if "sources" in environment else ""
    commit = f"commit {environment['commit']}{sources}"
    return f"{environment['device']}{threads}; {versions}; {commit}; {environment['date']}.{note}"


def sources_note(results: Iterable[tuple[str, Row]]) -> str:
    """List the results that were measured with the tree's sources, and those that were not."""
    by_state: dict[str, list[str]] = {"the same": [], "other": [], "unrecorded": []}
    for file, content in results:
        sources, parts = (content["environment"].get(name) for name in ("sources", "parts"))
        is_same = parts is not None and sources == source_hash(parts)
        by_state["unrecorded" if sources is None else "the same" if is_same else "other"].append(
            f"`{file}`"
        )
    lines = [
        f"- Measured with {state} sources: {', '.join(files)}."
        for state, files in by_state.items()
        if files
    ]
    begin = "Results hold a hash of the loaded code: the core, and the options and tools in use."
    return "\n".join([f"{begin} Comments and docstrings do not count.", "", *lines])


def page(folder: Path) -> str:
    lines = ["# Results", ""]
    lines += [
        "Written by `python benchmarks/results_page.py` from the JSON in `benchmarks/results/`.",
        "",
    ]
    results = [result for section in SECTIONS for result in find(section.name, folder)]
    lines += ["## Sources", "", sources_note(results), ""]
    lines += [
        "## Targets",
        "",
        (
            "Ours runs eagerly with the default schedule unless a row says otherwise. A row shows "
            "the worst of its cells."
        ),
        "",
        targets(folder),
    ]
    for section in SECTIONS:
        results = find(section.name, folder)
        lines += ["", f"## {section.title}"]
        if not results:
            lines += ["", f"Not measured yet: `python benchmarks/{section.name}.py`."]
        for file, content in results:
            lines += ["", origin(content), "", section.table(content).strip()]
            if (folder / f"{file}.png").exists():
                lines += ["", f"![{section.title}](results/{file}.png)"]
    return "\n".join([*lines, *_gpu_page.section(folder)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    args.page.write_text(page(args.results), encoding="utf-8")
    print(f"written to {args.page}")


if __name__ == "__main__":
    main()
