"""Measure `generate()` of every engine on the bundled pair, and on GPUs on a Llama-3-8B shape.

    python benchmarks/end_to_end.py                                # a default for the machine
    python benchmarks/end_to_end.py --grid full --limit-s 7200
    python benchmarks/end_to_end.py --subjects pair --batch-sizes 1 --modes greedy

Every text is checked against plain `generate()` before it counts; then all methods alternate in one
process. Assisted generation and prompt lookup in transformers take one row, so a batch is compared
with plain batched decoding and with a loop of assisted generation over the rows. An oracle fixes
the tokens of a random pair; see `_subjects.Oracle`.
"""

import argparse
from typing import Any

import torch
from _costs import MAX_K, measure_costs, tokens_per_round
from _engines import (
    ASSISTS_COMPILED,
    DEFAULT,
    LOOKUP,
    PLAIN_COMPILED,
    PLAIN_METHOD,
    Runner,
    Timings,
    assisted,
    check,
    compile_all,
    faster_dtype,
    is_compiled,
    ours,
    warm_up,
)
from _harness import (
    ROOT,
    Cells,
    Results,
    add_argument_of_adding,
    add_common_arguments,
    markdown,
    parse_common,
    result_name,
)
from _library import CACHES, DEFAULT_SCHEDULE
from _pictures import Panel, draw
from _subjects import DTYPES, SHAPES, Subject, load_pair, load_shape

from hf_speculate.tools.bench.decoding import Batch
from hf_speculate.tools.bench.methods import OURS, TRANSFORMERS, Method

NAME = "end_to_end"
# These verifiers are measured in addition to the default verifier of the mode.
VERIFIERS = {"greedy": ("typical",), "sampling": ("block", "coupled", "typical")}
VERIFIERS_K = 5  # K for the comparison of verifiers
COMPILED_NUMS = (None, 5, 8)  # K of the compiled methods; None for the default schedule
COMPILED_BATCH_SIZES = (1, 8)
GRIDS = {
    "small": {"batch_sizes": [1, 8], "num_assistant_tokens": [3, 5, 8]},
    "full": {"batch_sizes": [1, 2, 4, 8, 16], "num_assistant_tokens": [2, 3, 4, 5, 6, 8, 10]},
}
Row = dict[str, Any]


def methods_of(
    batch_size: int, mode: str, args: argparse.Namespace, has_lookup: bool
) -> list[Method]:
    """Return all methods for a cell, starting with plain decoding."""
    draft_lens, slow_draft_lens = args.num_assistant_tokens, args.num_assistant_tokens
    if batch_size > 1 and args.grid == "small":
        # The loop over rows takes many times as long.
        slow_draft_lens = [min(draft_lens, key=lambda draft_len: abs(draft_len - VERIFIERS_K))]
    methods = [PLAIN_METHOD, DEFAULT, *(ours(draft_len) for draft_len in draft_lens)]
    methods += [ours(VERIFIERS_K, verifier) for verifier in VERIFIERS[mode] if args.verifiers]
    if args.compiled and mode == "greedy" and batch_size in COMPILED_BATCH_SIZES:
        methods += [
            PLAIN_COMPILED,
            *(ours(draft_len, is_compiled=True) for draft_len in COMPILED_NUMS),
        ]
        if batch_size == 1 and ASSISTS_COMPILED:
            methods += [assisted(draft_len, is_compiled=True) for draft_len in COMPILED_NUMS]
    methods += [assisted(), *(assisted(draft_len) for draft_len in slow_draft_lens)]
    return methods + ([LOOKUP] if has_lookup and batch_size == 1 else [])


def checked(runner: Runner, methods: list[Method], batch: Batch) -> str:
    """Return the result of the checks.

    Random pairs are also checked without the oracle, because only then do the caches affect the
    text.
    """
    if runner.subject.oracle is None:
        return check(runner, methods, batch)
    with runner.subject.oracle.silent():
        unforced = check(runner, methods, batch, max_new_tokens=min(16, runner.max_new_tokens))
    return f"{check(runner, methods, batch)} ({unforced} without the oracle)"


def measure(subject: Subject, batch_size: int, mode: str, args: argparse.Namespace) -> list[Row]:
    """Measure one cell, and return a row for every method."""
    runner = Runner(subject, mode, args.max_new_tokens, args.cache)
    methods = methods_of(batch_size, mode, args, subject.oracle is None)
    num_prompts = max(args.prompts, batch_size)
    batches = subject.batches(num_prompts, batch_size)
    compile_s = compile_all(runner, methods, batches)
    warm_up(runner, [method for method in methods if not is_compiled(method)], batches[0])
    check_result = checked(runner, methods, batches[0])
    timings = Timings()
    for batch in batches:
        timings.add(runner, methods, batch, args.repeats)
    plain_s = timings.plain_step_s(args.max_new_tokens)
    middle_batch = sorted(batches, key=lambda batch: batch.input_ids.shape[1])[len(batches) // 2]
    costs = measure_costs(subject, middle_batch, args.max_new_tokens, plain_s, 9, range(MAX_K + 1))
    counted = tokens_per_round(
        runner, subject.batches(num_prompts, min(num_prompts, 8)), args.max_k
    )
    bound, bound_k = costs.bound(batch_size, counted)
    rows = []
    for method in methods:
        row = {
            "subject": subject.name,
            "oracle_acceptance": subject.oracle.acceptance if subject.oracle else None,
            "dtype": subject.dtype,
            "batch_size": batch_size,
            "mode": mode,
            "checked": check_result,
            "schedule": DEFAULT_SCHEDULE
            if method.engine == OURS and method.num_assistant_tokens is None
            else "constant",
            **timings.summary(method),
            "compile_s": compile_s.get(method.name),
            "plain_step_s": plain_s,
            "bound": bound,
            "bound_k": bound_k,
        }
        row["tokens_per_s"] = batch_size * args.max_new_tokens / row["seconds"]["median"]
        if method.engine == OURS:
            row |= costs.report(row["counts"], batch_size)
        # The costs are measured with eager forwards.
        if method.engine == OURS and not is_compiled(method):
            row["efficiency"] = row["decode_over_plain"] / row["expected"]
            row["share_of_bound"] = (
                row["decode_over_plain"] / bound if not method.verifier else None
            )
        rows.append(row)
    rows[0]["tokens_per_round_by_k"] = counted
    rows[0]["c"], rows[0]["v_by_k"] = (
        costs.c(batch_size),
        [costs.v(batch_size, draft_len) for draft_len in range(MAX_K + 1)],
    )
    return rows


def has_bound(row: Row) -> bool:
    """Return whether the bound for eager forwards applies to a row."""
    return row["engine"] == OURS and not row.get("is_compiled")


def compiled_note(row: Row) -> str | None:
    """Return the compilation time in seconds, or a note if the method fell back to eager."""
    if not row.get("is_compiled"):
        return None
    return "no: fell back to eager" if row["fell_back"] else f"in {row['compile_s']:.0f} s"


COLUMNS = {
    "pair": lambda row: (
        row["subject"]
        + (f", {row['oracle_acceptance']} accepted" if row["oracle_acceptance"] else "")
    ),
    "dtype": lambda row: row["dtype"],
    "rows": lambda row: row["batch_size"],
    "mode": lambda row: row["mode"],
    "method": lambda row: row["method"],
    "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "times plain (min to max)": lambda row: "{median:.2f} ({min:.2f} to {max:.2f})".format(
        **row["over_plain"]
    ),
    "after the prompt": lambda row: (
        None
        if row["engine"] == TRANSFORMERS and row["batch_size"] > 1
        else row["decode_over_plain"]
    ),
    "compiled": lambda row: compiled_note(row),
    "verified acceptance rate": lambda row: row.get("verified_acceptance_rate"),
    "K": lambda row: row.get("realised_k"),
    "mean acceptance length": lambda row: row.get("mean_acceptance_length"),
    "c": lambda row: row.get("c") if has_bound(row) else None,
    "v": lambda row: row.get("v") if has_bound(row) else None,
    "efficiency": lambda row: row.get("efficiency"),
    "bound (K)": lambda row: f"{row['bound']:.2f} ({row['bound_k']})" if has_bound(row) else None,
    "share of bound": lambda row: row.get("share_of_bound"),
    "checked": lambda row: row["checked"] if row["method"] == PLAIN_METHOD.name else None,
}
NOTES = """\
K, the verified acceptance rate and the mean acceptance length are measured. c is the time of a
draft step, and v the time of a target forward over K+1 tokens. Both are timed directly with the
library's forwards, and divided by the time per token of plain `generate()`. The expected speed-up
is the mean acceptance length / (K c + v). Efficiency is the speed-up after the prompt over the
expected one. The bound is the largest expected speed-up over constant K, for a loop without
overhead and the default verifier. "transformers" is its assisted generation, a batch row by row.
"after the prompt" leaves the target's first forward out on both sides. Other verifiers are measured
at one K. Compiled methods run over a static cache (`cache_implementation="static"`,
`compile_config`); transformers' assisted generation compiles the target alone, for one row.
"compiled" gives the seconds of compilation, before anything was timed. c, v and the bound are those
of eager forwards.
"""


def table(content: dict[str, Any]) -> str:
    """Format all rows, and explain the columns."""
    return f"{NOTES}\n{markdown(COLUMNS, content['rows'])}"


def picture(rows: list[Row], args: argparse.Namespace) -> None:
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(f"{row['subject']}, {row['batch_size']} rows, {row['mode']}", []).append(
            row
        )
    panels = [
        Panel(
            title,
            "times plain generate()",
            {
                "measured": [(row["method"], row["over_plain"]) for row in members],
                "bound of the pair": [
                    (row["method"], row["bound"]) for row in members if has_bound(row)
                ],
            },
            reference=1.0,
        )
        for title, members in cells.items()
    ]
    draw(args.results / f"{result_name(NAME, args.device)}.png", panels)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=2, limit_s=1800.0)
    parser.add_argument("--grid", choices=sorted(GRIDS), default="small")
    parser.add_argument("--subjects", nargs="+", choices=["pair", *SHAPES])
    parser.add_argument("--batch-sizes", nargs="+", type=int)
    parser.add_argument("--modes", nargs="+", choices=sorted(VERIFIERS), default=list(VERIFIERS))
    parser.add_argument("--num-assistant-tokens", nargs="+", type=int)
    parser.add_argument(
        "--no-verifiers",
        dest="verifiers",
        action="store_false",
        help="only each mode's default one",
    )
    parser.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        help="unset: in the small grid; greedy, 1 and 8 rows",
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-k", type=int, default=MAX_K, help="largest K for the pair's bound")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=sorted(DTYPES),
        help="of several the faster one; unset: float32",
    )
    parser.add_argument(
        "--acceptances", nargs="+", type=float, default=[0.8], help="of random pairs"
    )
    parser.add_argument("--layers", type=int, help="of a random target, to shrink it")
    parser.add_argument("--draft-layers", type=int, help="of a random draft, to shrink it")
    parser.add_argument("--cache", choices=CACHES, default="auto")
    add_argument_of_adding(parser)
    args = parse_common(parser)
    args.compiled = args.grid == "small" if args.compiled is None else args.compiled
    has_gpu = args.device.type == "cuda"
    args.subjects = args.subjects or (["pair", "llama-8b"] if has_gpu else ["pair"])
    for name, values in GRIDS[args.grid].items():
        setattr(args, name, getattr(args, name) or values)
    return args


def cell_of(row: Row) -> tuple[str, float, int, str]:
    return row["subject"], row["oracle_acceptance"] or 0.0, row["batch_size"], row["mode"]


def main() -> None:
    args = parse()
    cells = [
        (name, acceptance, batch_size, mode)
        for name in args.subjects
        for acceptance in (args.acceptances if name in SHAPES else [None])
        for batch_size in args.batch_sizes
        for mode in args.modes
    ]
    results = Results(NAME, args, cell_of)
    walk = Cells(cells, args.limit_s, "cells")
    pair, dtype_of = (None, None), {}
    for name, acceptance, batch_size, mode in walk:

        def make(dtype: str, name: str = name, acceptance: float | None = acceptance) -> Subject:
            if name not in SHAPES:
                return load_pair(dtype, args.device)
            return load_shape(name, dtype, args.device, acceptance, args.layers, args.draft_layers)

        if (name, batch_size) not in dtype_of:
            pair = (None, None)  # frees the previous pair
            # An oracle fixes the texts of random pairs; other pairs need float32 for equal texts.
            dtypes = args.dtypes or [
                "bfloat16" if name in SHAPES and args.device.type == "cuda" else "float32"
            ]
            dtype_of[name, batch_size] = faster_dtype(make, dtypes, batch_size)
        key = (name, acceptance, dtype_of[name, batch_size])
        if pair[0] != key:
            pair = (None, None)
            pair = (key, make(key[2]))
        results.add(measure(pair[1], batch_size, mode, args))
        torch.cuda.empty_cache()
    args.left_out = walk.left_out
    path = results.write()
    print(table({"rows": results.rows}))
    picture(results.rows, args)
    print(f"written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


if __name__ == "__main__":
    main()
