"""Writes the tables of speed in README and docs from the JSON of `end_to_end.py`; nothing is measured.

python benchmarks/readme_tables.py
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _harness import ROOT, markdown, read_results, write_between

from hf_speculate.stats import SpeculationStats

COLUMNS = {
    "1 row, greedy": (1, "greedy"),
    "8 rows, greedy": (8, "greedy"),
    "1 row, sampling": (1, "sampling"),
    "8 rows, sampling": (8, "sampling"),
}
BEST = "= "  # ends what stands for the best constant K that was measured
# Name on the page -> method of the JSON.
COMPARED = {
    "transformers, default": "transformers, defaults",
    "transformers, best constant K": f"transformers, K {BEST}",
    "hf_speculate, default": "ours, adaptive",
    "hf_speculate, best constant K": f"ours, K {BEST}",
    "hf_speculate, default, compiled": "ours, adaptive, compiled",
    "plain, compiled": "plain, compiled",
}
LENGTHS = (3, 5, 8)

Cells = dict[tuple[str, int, str], dict[str, Any]]


def cells_of(results: dict[str, Any]) -> Cells:
    """The rows of the bundled pair in float32 with the default verifier, by method, rows and mode."""
    return {
        (row["method"], row["batch_size"], row["mode"]): row
        for row in results["rows"]
        if (row["verifier"], row["subject"], row["dtype"]) == (None, "pair", "float32")
    }


def comparison_table(cells: Cells) -> str:
    """Median over plain decoding: defaults, the best constant K of each column, and compiled methods."""

    def shown(method: str, column: tuple[int, str]) -> str | None:
        names = [f"{method}{num}" for num in LENGTHS] if method.endswith(BEST) else [method]
        speedups = [cells[(name, *column)]["over_plain"]["median"] for name in names if (name, *column) in cells]
        return f"{max(speedups):.2f}x" if speedups else None

    rows = [{"method": name} | {head: shown(of, COLUMNS[head]) for head in COLUMNS} for name, of in COMPARED.items()]
    return markdown({head: lambda row, head=head: row[head] for head in ("method", *COLUMNS)}, rows)


def origin(results: dict[str, Any]) -> str:
    """What measured the figures."""
    environment = results["environment"]
    versions = "torch {torch} and transformers {transformers}".format(**environment["versions"])
    machine = f"{environment['threads']} cores of an {environment['device']}"
    return f"Measured on {machine} with {versions}, commit {environment['commit']}."


def statistics(cells: Cells) -> str:
    """The lines of the statistics of the default method, one row, greedy."""
    text = str(SpeculationStats(**cells["ours, adaptive", 1, "greedy"]["counts"]))
    return "\n".join(
        ["```text", *(line for line in text.splitlines() if "acceptance" in line and "per" not in line), "```"]
    )


def parts(results: dict[str, Any]) -> dict[str, str]:
    """Name of a place in a page -> its content."""
    cells = cells_of(results)
    return {
        "comparison": comparison_table(cells),
        "origin": origin(results),
        "statistics": statistics(cells),
    }


PAGES = {"README.md": ("comparison", "origin", "statistics"), "docs/index.md": ("comparison", "origin")}


def write_pages(root: Path, names: Iterable[str] = PAGES) -> None:
    """Fill the places of the pages below `root`."""
    written = parts(read_results("end_to_end"))
    for page in names:
        for name in PAGES[page]:
            write_between(root / page, name, written[name])


if __name__ == "__main__":
    write_pages(ROOT)
    print(f"written: {', '.join(PAGES)}")
