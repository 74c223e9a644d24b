"""Time top-k and top-p on the rows of one round on a CPU, in transformers and hf_speculate.

python benchmarks/warpers.py
"""

import argparse
from itertools import product
from statistics import median
from typing import Any

import torch
from _harness import (
    Cells,
    Results,
    add_common_arguments,
    alternate,
    markdown,
    milliseconds,
    parse_common,
    settle_allocator,
    speedups,
    spread,
)
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from hf_speculate.processors import BlockLogitsProcessorList

NAME = "warpers"
WARPERS = {
    "top-k": [TopKLogitsWarper(50)],
    "top-p": [TopPLogitsWarper(0.9)],
    "top-k, top-p": [TopKLogitsWarper(50), TopPLogitsWarper(0.9)],
}
NUM_DRAFT_TOKENS = 5
SPREAD = 2.5  # standard deviation of the logits
Row = dict[str, Any]


def measure(batch_size: int, vocab_size: int, name: str, repeats: int) -> Row:
    """Measure one cell with B rows of K + 1 positions."""
    num_positions = NUM_DRAFT_TOKENS + 1
    scores = torch.randn(batch_size, num_positions, vocab_size) * SPREAD
    prefixes = torch.zeros(batch_size, 1, dtype=torch.int64)
    drafts = torch.zeros(batch_size, NUM_DRAFT_TOKENS, dtype=torch.int64)
    theirs, ours = LogitsProcessorList(WARPERS[name]), BlockLogitsProcessorList(WARPERS[name])
    calls = {
        "transformers": lambda: theirs(prefixes, scores.flatten(0, 1)),
        "ours": lambda: ours(prefixes, scores, drafts),
    }
    if not torch.equal(calls["transformers"](), calls["ours"]().flatten(0, 1)):
        raise SystemExit(f"{name}: the results differ")
    seconds = alternate(calls, repeats, f"{batch_size} rows, V = {vocab_size}, {name}")
    return {
        "batch_size": batch_size,
        "num_positions": num_positions,
        "vocab_size": vocab_size,
        "warpers": name,
        "transformers_s": spread(seconds["transformers"]),
        "ours_s": spread(seconds["ours"]),
        "median_ratio": median(seconds["transformers"]) / median(seconds["ours"]),
        "ours_is_faster": speedups(seconds["transformers"], seconds["ours"]),
        "checked": "equal, bit for bit",
    }


COLUMNS = {
    "rows": lambda row: row["batch_size"],
    "positions": lambda row: row["num_positions"],
    "V": lambda row: row["vocab_size"],
    "warpers": lambda row: row["warpers"],
    "transformers, ms (min to max)": lambda row: milliseconds(row["transformers_s"], 2),
    "ours, ms (min to max)": lambda row: milliseconds(row["ours_s"], 2),
    "times faster": lambda row: f"{row['median_ratio']:.1f}",
    "checked": lambda row: row["checked"],
}


def table(content: dict[str, Any]) -> str:
    """Format all cells."""
    return markdown(COLUMNS, content["rows"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=21, limit_s=300.0)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[4_096, 32_000, 151_936])
    parser.add_argument("--warpers", nargs="+", choices=list(WARPERS), default=list(WARPERS))
    args = parse_common(parser)
    if args.device.type != "cpu":
        raise SystemExit("this benchmark is of code for CPUs: pass --device cpu")
    settle_allocator()
    cells = list(product(args.batch_sizes, args.vocab_sizes, args.warpers))
    walk, results = Cells(cells, args.limit_s, "cells"), Results(NAME, args)
    for batch_size, vocab_size, name in walk:
        results.add([measure(batch_size, vocab_size, name, args.repeats)])
    args.left_out = walk.left_out
    print(table({"rows": results.rows}))
    print(f"written to {results.write()}")


if __name__ == "__main__":
    main()
