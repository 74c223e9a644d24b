"""Measure speed by context, new tokens and rows, on a random pair with Qwen2-0.5B's shape.

    python benchmarks/scaling.py                     # a CPU: four target layers in the sweep
    python benchmarks/scaling.py --layers 24

On a CPU, the target in the sweep has fewer layers; for `--whole-contexts`, it has all layers.

An oracle fixes the acceptance rate while all work is done; see `_subjects.Oracle`. The verify
factor is measured separately, with all layers, over caches with random states. hf_speculate runs
its own forward, and transformers runs its forward with a `DynamicCache`. Both times are divided by
the time of the transformers forward of a single row.
"""

import argparse
from statistics import median
from typing import Any

import torch
from _costs import MAX_K, forward_calls, measure_costs
from _engines import (
    DEFAULT,
    PLAIN_METHOD,
    Runner,
    Timings,
    assisted,
    check,
    faster_dtype,
    ours,
    warm_up,
)
from _harness import (
    Cells,
    Results,
    add_argument_of_adding,
    add_common_arguments,
    alternate,
    markdown,
    parse_common,
)
from _library import CACHES, as_in_a_call
from _pictures import Panel, draw
from _subjects import DTYPES, SHAPES, Subject, load_shape
from transformers.cache_utils import DynamicCache

from hf_speculate.compat import CACHE_NAME
from hf_speculate.tools.bench.methods import OURS
from hf_speculate.tools.bench.results import spread

NAME = "scaling"
CHECKED_PROMPT_LEN, CHECKED_TOKENS = 64, 12
WHOLE, VERIFY = "context, all layers", "verify"
Row = dict[str, Any]


def cells_of(args: argparse.Namespace) -> list[tuple[str, int, int, int]]:
    """Return the varied quantity, context, new tokens and rows of each cell."""
    cells = [("context", length, args.max_new_tokens, 1) for length in args.contexts]
    cells += [("new tokens", args.contexts[0], num_new, 1) for num_new in args.new_tokens]
    return cells + [
        ("rows", args.batch_context, args.max_new_tokens, rows) for rows in args.batch_sizes
    ]


def whole_cells_of(args: argparse.Namespace) -> list[tuple[str, int, int, int]]:
    """Return cells for the target with all layers; empty if the sweep already uses all layers."""
    is_whole = args.layers == SHAPES[args.shape][1]["num_hidden_layers"]
    return (
        []
        if is_whole
        else [(WHOLE, length, args.max_new_tokens, 1) for length in args.whole_contexts]
    )


def measure(
    subject: Subject, cell: tuple[str, int, int, int], args: argparse.Namespace
) -> list[Row]:
    """Measure one cell, and return a row for every method."""
    varies, context, max_new_tokens, batch_size = cell
    runner, constant = (
        Runner(subject, "greedy", max_new_tokens, args.cache),
        ours(args.num_assistant_tokens),
    )
    methods = [PLAIN_METHOD, DEFAULT, constant]
    if batch_size == 1 and varies != "new tokens":
        methods += [assisted(args.num_assistant_tokens), assisted()]
    batch = subject.batches(batch_size, batch_size, context)[0]
    plain, profiled = Timings(), Timings()
    plain.add(runner, methods, batch, args.repeats)
    subject.clock.is_profiling = True
    profiled.add(runner, [constant], batch, 1)
    subject.clock.is_profiling = False
    num_rounds = profiled.counts[constant.name]["num_batch_rounds"]
    overhead_s = (profiled.rounds_s[constant.name][0] - profiled.forward_s[constant.name][0]) / max(
        num_rounds, 1
    )
    plain_s, draft_lens = (
        plain.plain_step_s(max_new_tokens),
        sorted({0, args.num_assistant_tokens, MAX_K}),
    )
    costs = measure_costs(subject, batch, max_new_tokens, plain_s, repeats=3, nums=draft_lens)
    rows = []
    for method in methods:
        row = {
            "varies": varies,
            "context": context,
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
        }
        row |= {"layers": subject.target.config.num_hidden_layers}
        row |= {"subject": subject.name, "dtype": subject.dtype, **plain.summary(method)}
        per_token = [seconds / (max_new_tokens - 1) for seconds in plain.decode_s[method.name]]
        row["step_s"] = spread(per_token)  # time per token and row, after the prompt
        row["tokens_per_s"] = batch_size / row["step_s"]["median"]
        if method.engine == OURS:
            row |= costs.report(row["counts"], batch_size)
            row["efficiency"] = row["decode_over_plain"] / row["expected"]
        if method == constant:
            row["rest_of_round_s"] = overhead_s
        rows.append(row)
    return rows


def verify_factor(subject: Subject, args: argparse.Namespace) -> Row:
    """Measure the verify factors for `--verify-queries` in hf_speculate and transformers."""
    target, batch_size, num_queries = subject.target, args.verify_batch, args.verify_queries
    length, config = args.verify_context, target.config
    our_calls, undo_ours = forward_calls(target, batch_size, length, None, [num_queries], "ours")
    cache = DynamicCache(config=config)
    heads = (
        batch_size,
        config.num_key_value_heads,
        length,
        config.hidden_size // config.num_attention_heads,
    )
    for layer in range(config.num_hidden_layers):
        states = torch.randn(heads, dtype=target.dtype, device=target.device)
        cache.update(states, states.clone(), layer)
    mask = torch.ones(batch_size, length + num_queries, dtype=torch.int64, device=target.device)
    ids = torch.zeros(batch_size, num_queries, dtype=torch.int64, device=target.device)

    @torch.no_grad()
    def theirs(num_query: int) -> None:
        step_mask = mask[:, : length + num_query]
        target(
            input_ids=ids[:, :num_query],
            attention_mask=step_mask,
            **{CACHE_NAME: cache},
            use_cache=True,
        )

    def undo() -> None:
        undo_ours()
        if cache.get_seq_length() > length:
            cache.crop(length - cache.get_seq_length())

    def mine() -> None:
        with as_in_a_call(target):
            our_calls[f"ours {num_queries}"]()

    calls = {
        "ours": mine,
        "transformers": lambda: theirs(num_queries),
        "one row": lambda: theirs(1),
    }
    alternate(calls, 1, prepare=undo)
    seconds = alternate(calls, args.verify_repeats, f"forwards at {length} tokens", undo)
    one_row_s = median(seconds["one row"])
    return {
        "varies": VERIFY,
        "context": length,
        "batch_size": batch_size,
        "num_queries": num_queries,
        "layers": config.num_hidden_layers,
        "dtype": subject.dtype,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "v": {name: median(seconds[name]) / one_row_s for name in ("ours", "transformers")},
    }


COLUMNS = {
    "varies": lambda row: row["varies"],
    "layers": lambda row: row["layers"],
    "context": lambda row: row["context"],
    "new tokens": lambda row: row["max_new_tokens"],
    "rows": lambda row: row["batch_size"],
    "dtype": lambda row: row["dtype"],
    "method": lambda row: row["method"],
    "tokens/s": lambda row: f"{row['tokens_per_s']:.1f}",
    "ms per token": lambda row: row["step_s"]["median"] * 1e3,
    "times plain": lambda row: row["decode_over_plain"],
    "verified acceptance rate": lambda row: row.get("verified_acceptance_rate"),
    "K": lambda row: row.get("realised_k"),
    "mean acceptance length": lambda row: row.get("mean_acceptance_length"),
    "c": lambda row: row.get("c"),
    "v": lambda row: row.get("v"),
    "efficiency": lambda row: row.get("efficiency"),
    "ms of a round outside forwards": lambda row: (
        row["rest_of_round_s"] * 1e3 if "rest_of_round_s" in row else None
    ),
}
NOTES = """\
A random pair of Qwen2-0.5B's shape ({draft_layers} layers in the draft). An oracle fixes both
models' tokens, so the acceptance rate is about {acceptance} while all forwards really run. All
times leave the target's first forward out, and include the draft's forward over the prompt. The
last column must not grow with context.
"""


def table(content: dict[str, Any]) -> str:
    """Format the sweep and the verify factor."""
    rows, arguments = content["rows"], content["arguments"]
    parts = [
        NOTES.format(**arguments),
        markdown(COLUMNS, [row for row in rows if row["varies"] != VERIFY]),
    ]
    for row in rows:
        if row["varies"] == VERIFY:
            place = f"{row['batch_size']} rows, {row['context']} tokens, {row['layers']} layers, "
            place += row["dtype"]
            ours, theirs = row["v"]["ours"], row["v"]["transformers"]
            parts.append(
                f"\nv({row['num_queries']}) at {place}: {ours:.2f}, in transformers' forward "
                f"{theirs:.2f}."
            )
    return "\n".join(parts)


def picture(rows: list[Row], path: Any) -> None:
    panels = []
    for varies, key in (
        ("context", "context"),
        ("new tokens", "max_new_tokens"),
        ("rows", "batch_size"),
    ):
        series: dict[str, list[Any]] = {}
        for row in rows:
            if row["varies"] == varies:
                times = {name: value * 1e3 for name, value in row["step_s"].items()}
                series.setdefault(row["method"], []).append((row[key], times))
        panels.append(
            Panel(
                f"time per token over {varies}", "ms per token", series, xlabel=varies, is_log=True
            )
        )
    draw(path.with_suffix(".png"), panels)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=2, limit_s=900.0)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-0.5b")
    parser.add_argument(
        "--layers", type=int, help="of the target in the sweep; 4 on a CPU, all on a GPU"
    )
    parser.add_argument("--draft-layers", type=int, default=1)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--contexts", nargs="*", type=int, default=[256, 1024, 2048, 4096, 8192])
    parser.add_argument("--whole-contexts", nargs="*", type=int, default=[8192])
    parser.add_argument("--new-tokens", nargs="*", type=int, default=[16, 64, 256])
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[2, 8])
    parser.add_argument("--batch-context", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--num-assistant-tokens", type=int, default=5)
    parser.add_argument(
        "--verify-layers",
        type=int,
        help="of the target of the verify factor; unset: all",
    )
    parser.add_argument("--verify-batch", type=int, default=8)
    parser.add_argument("--verify-context", type=int, default=2048)
    parser.add_argument("--verify-queries", type=int, default=6)
    parser.add_argument("--verify-repeats", type=int, default=7)
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=sorted(DTYPES),
        help="unset: the faster one for plain decoding",
    )
    parser.add_argument("--cache", choices=CACHES, default="auto")
    add_argument_of_adding(parser)
    args = parse_common(parser)
    if args.new_tokens and not args.contexts:
        parser.error("--new-tokens are measured at the first of --contexts; name one")
    on_gpu = args.device.type == "cuda"
    args.layers = args.layers or (SHAPES[args.shape][1]["num_hidden_layers"] if on_gpu else 4)
    args.dtypes = args.dtypes or (["bfloat16"] if on_gpu else sorted(DTYPES))
    return args


def cell_of(row: Row) -> tuple[str, int, int, int]:
    return row["varies"], row["context"], row.get("max_new_tokens", 0), row["batch_size"]


def main() -> None:
    args = parse()

    def make(dtype: str, layers: int | None = args.layers) -> Subject:
        return load_shape(
            args.shape, dtype, args.device, args.acceptance, layers, args.draft_layers
        )

    args.dtype = faster_dtype(make, args.dtypes, 1)
    results = Results(NAME, args, cell_of)
    results.add([verify_factor(make(args.dtype, args.verify_layers), args)])
    subject = make(args.dtype)
    runner = Runner(subject, "greedy", CHECKED_TOKENS, args.cache)
    batch = subject.batches(2, 2, CHECKED_PROMPT_LEN)[0]
    methods = [DEFAULT, ours(args.num_assistant_tokens)]
    with subject.oracle.silent():
        print(f"without the oracle: {check(runner, methods, batch)}")
    print(f"with it: {check(runner, methods, batch)}")
    warm_up(runner, [PLAIN_METHOD, *methods, assisted()], batch)
    walk = Cells(cells_of(args), args.limit_s, "cells")
    for cell in walk:
        results.add(measure(subject, cell, args))
    for cell in whole_cells_of(args):
        subject = make(args.dtype, None)
        results.add(measure(subject, cell, args))
    args.left_out = walk.left_out
    path = results.write()
    print(table({"rows": results.rows, "arguments": vars(args)}))
    picture(results.rows, path)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
