"""Measure the overhead of bookkeeping and verification in a round, from inside and outside.

    python benchmarks/overhead.py

From inside, the overhead is the time of the stages in `SpeculationStats`, where sampling the drafts
counts as drafting. From outside, it is the time after the first forward of the target, minus the
time in forward calls of the two models, which hooks measure.
"""

import argparse
from typing import Any

from _costs import measure_costs
from _engines import MODES, PLAIN_METHOD, Runner, Timings, check, ours, warm_up
from _harness import Cells, Results, add_common_arguments, markdown, parse_common, spread
from _library import CACHES
from _pictures import Panel, draw
from _subjects import DTYPES, Subject, load_pair

NAME = "overhead"
Row = dict[str, Any]


def measure(subject: Subject, batch_size: int, mode: str, args: argparse.Namespace) -> Row:
    """Measure one cell."""
    runner, method = (
        Runner(subject, mode, args.max_new_tokens, args.cache),
        ours(args.num_assistant_tokens),
    )
    methods = [PLAIN_METHOD, method]
    batches = subject.batches(max(args.prompts, batch_size), batch_size)
    warm_up(runner, methods, batches[0])
    checked = check(runner, methods, batches[0])
    unprofiled, profiled = Timings(), Timings()
    for batch in batches:
        subject.clock.is_profiling = False
        unprofiled.add(runner, methods, batch, args.repeats)
        subject.clock.is_profiling = True
        profiled.add(runner, methods, batch, args.repeats)
    subject.clock.is_profiling = False
    counts = unprofiled.counts[method.name]
    own_s, all_stages_s = (
        sum(counts[f"{stage}_s"] for stage in stages) for stages in (OWN, (*OWN, "draft", "score"))
    )
    pairs = list(zip(profiled.rounds_s[method.name], profiled.forward_s[method.name], strict=True))
    costs = measure_costs(
        subject, batches[0], args.max_new_tokens, unprofiled.plain_step_s(args.max_new_tokens)
    )
    row = {"dtype": subject.dtype, "batch_size": batch_size, "mode": mode, "checked": checked}
    row |= unprofiled.summary(method) | costs.report(counts, batch_size)
    row["efficiency"] = row["decode_over_plain"] / row["expected"]
    row["round_s"] = all_stages_s / counts["num_batch_rounds"]
    row["share_inside"] = own_s / all_stages_s
    row["verify_share_inside"] = counts["verify_s"] / all_stages_s
    row["share_outside"] = spread([1 - forward_s / rounds_s for rounds_s, forward_s in pairs])
    return row


OWN = ("verify", "bookkeeping")
COLUMNS = {
    "dtype": lambda row: row["dtype"],
    "rows": lambda row: row["batch_size"],
    "mode": lambda row: row["mode"],
    "round, ms": lambda row: row["round_s"] * 1e3,
    "own share, from inside": lambda row: f"{row['share_inside']:.1%}",
    "of it verification": lambda row: f"{row['verify_share_inside']:.1%}",
    "own share, from outside (min to max)": lambda row: (
        "{median:.1%} ({min:.1%} to {max:.1%})".format(**row["share_outside"])
    ),
    "verified acceptance rate": lambda row: row["verified_acceptance_rate"],
    "K": lambda row: row["realised_k"],
    "mean acceptance length": lambda row: row["mean_acceptance_length"],
    "c": lambda row: row["c"],
    "v": lambda row: row["v"],
    "efficiency": lambda row: row["efficiency"],
}
NOTES = """\
The bundled pair at constant K. Own share is the part of a round outside the two models' forwards.
From inside it is verification and bookkeeping over all stages. From outside it is all time after
the target's first forward and outside forward calls: drawing the drafts, masks, position ids and
cache rollback included.
"""


def table(content: dict[str, Any]) -> str:
    """Format all cells, and explain the columns."""
    return f"{NOTES}\n{markdown(COLUMNS, content['rows'])}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=3, limit_s=300.0)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=list(MODES))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-assistant-tokens", type=int, default=5)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--cache", choices=CACHES, default="auto")
    args = parse_common(parser)
    subject = load_pair(args.dtype, args.device)
    walk = Cells(
        [(size, mode) for size in args.batch_sizes for mode in args.modes], args.limit_s, "cells"
    )
    results = Results(NAME, args)
    for batch_size, mode in walk:
        results.add([measure(subject, batch_size, mode, args)])
    args.left_out = walk.left_out
    path, rows = results.write(), results.rows
    print(table({"rows": rows}))
    labels = [f"{row['batch_size']} rows, {row['mode']}" for row in rows]
    series = {
        "from outside": [
            (label, row["share_outside"]) for label, row in zip(labels, rows, strict=True)
        ],
        "from inside": [
            (label, row["share_inside"]) for label, row in zip(labels, rows, strict=True)
        ],
    }
    draw(
        path.with_suffix(".png"),
        [Panel("What a round costs besides its forwards", "share of it", series, 0.05)],
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
