"""Write the tables of speed in README and docs from `end_to_end.json` and `real_models.json`.

python benchmarks/readme_tables.py
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _harness import ROOT, markdown, read_results, write_between

COLUMNS = {
    "1 row, greedy": (1, "greedy"),
    "8 rows, greedy": (8, "greedy"),
    "1 row, sampling": (1, "sampling"),
    "8 rows, sampling": (8, "sampling"),
}
BEST = "best K"  # placeholder for the fastest constant K
# Names on the page -> methods of the JSON.
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

Cells = dict[tuple[str, int, str], dict[str, Any]]


def cells_of(results: dict[str, Any]) -> Cells:
    """Return the rows of the bundled pair in float32 with the default verifier.

    Keys are method, number of rows and mode.
    """
    return {
        (row["method"], row["batch_size"], row["mode"]): row
        for row in results["rows"]
        if (row["verifier"], row["subject"], row["dtype"]) == (None, "pair", "float32")
    }


def comparison_table(cells: Cells) -> str:
    """Format medians over plain decoding: defaults, best constant K by column, compiled methods."""

    def shown(method: str, column: tuple[int, str]) -> str | None:
        names = {method.replace(BEST, f"K = {draft_len}") for draft_len in LENGTHS}
        speedups = [
            cells[(name, *column)]["over_plain"]["median"]
            for name in names
            if (name, *column) in cells
        ]
        return f"{max(speedups):.2f}x" if speedups else None

    rows = [
        {"method": name} | {head: shown(method_name, COLUMNS[head]) for head in COLUMNS}
        for name, method_name in COMPARED.items()
    ]
    measured = [row for row in rows if any(row[head] for head in COLUMNS)]
    return markdown(
        {head: lambda row, head=head: row[head] for head in ("method", *COLUMNS)}, measured
    )


def origin(results: dict[str, Any]) -> str:
    """Describe the machine and versions of the measurement."""
    environment = results["environment"]
    versions = "torch {torch} and transformers {transformers}".format(**environment["versions"])
    machine = f"{environment['threads']} cores of an {environment['device']}"
    return f"Measured on {machine} with {versions}, commit {environment['commit']}."


def real_models_table(results: dict[str, Any]) -> str:
    """Format our default over plain decoding by draft, beside transformers' better lookup."""
    by_source: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        by_source.setdefault(row["source"], []).append(row)

    def shown(rows: list[dict[str, Any]], name: str, *, is_alone: bool) -> str | None:
        means: dict[str, list[float]] = {}
        for row in rows:
            if (row["batch_size"] == 1) == is_alone and name in row:
                means.setdefault(row["prompts"], []).append(row[name]["mean"])
        ranges = {
            prompts: (f"{min(prompt_means):.2f}x", f"{max(prompt_means):.2f}x")
            for prompts, prompt_means in sorted(means.items())
        }
        return (
            ", ".join(
                f"{prompts} {' to '.join(dict.fromkeys(ends))}" for prompts, ends in ranges.items()
            )
            or None
        )

    rows = [
        {
            "draft": source,
            "1 row": shown(measured, "over_plain", is_alone=True),
            "8 rows": shown(measured, "over_plain", is_alone=False),
            "transformers' prompt lookup, 1 row": shown(
                measured, "rival_over_plain", is_alone=True
            ),
        }
        for source, measured in by_source.items()
    ]
    return markdown({head: lambda row, head=head: row[head] for head in rows[0]}, rows)


def parts(results: dict[str, Any], real: dict[str, Any]) -> dict[str, str]:
    """Return the content of each place in a page, by name.

    Args:
        results: of `end_to_end.py`.
        real: of `real_models.py`.
    """
    return {
        "comparison": f"{comparison_table(cells_of(results))}\n\n{origin(results)}",
        "real models": real_models_table(real),
    }


PAGES = {
    "README.md": ("comparison", "real models"),
    "docs/index.md": ("comparison",),
}


def write_pages(root: Path, names: Iterable[str] = PAGES) -> None:
    """Fill the places of the pages below `root`."""
    contents = parts(read_results("end_to_end"), read_results("real_models"))
    for page in names:
        for name in PAGES[page]:
            write_between(root / page, name, contents[name])


if __name__ == "__main__":
    write_pages(ROOT)
    print(f"written: {', '.join(PAGES)}")
