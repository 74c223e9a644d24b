r"""Compare the default schedule with plain `generate()` for useful, useless and costly drafts.

    python benchmarks/never_slower.py
    python benchmarks/never_slower.py --drafts bundled --batch-sizes 1 8 --repeats 6 --add
    python benchmarks/never_slower.py --drafts bundled --batch-sizes 1 8 --repeats 16 --add \
        --max-new-tokens 64
    python benchmarks/never_slower.py --targets smollm2 gemma3 --repeats 1 --add \
        --max-new-tokens 128

The second and the third command take ten minutes each. The last command downloads
SmolLM2-135M-Instruct and Gemma 3 270M, see `real_models.py`; these have no bundled draft.

A cell is a target, a number of new tokens, a draft, a number of rows, a prompt category and a mode.
Sampled cells use prompts from all categories, which do not differ; over a few calls, the acceptance
rate varies by 5 % by chance. The drafts are the bundled draft; a random draft with the same shape,
which is never accepted; and a copy of the target, which is always accepted but costs as much as the
target. With the last two, a constant K that is slower than plain decoding in a short probe is not
timed further. The default is compared with the best constant K by the total time of all batches.
For each batch, this K is the fastest one in the other batches, because choosing it on the same
batch would favour luck.
"""

import argparse
import copy
from itertools import chain, cycle, islice, product
from statistics import median
from typing import Any, NamedTuple

import torch
from _costs import measure_costs
from _engines import DEFAULT, PLAIN_METHOD, Runner, Timings, check, ours, warm_up
from _harness import (
    Cells,
    Results,
    add_argument_of_adding,
    add_common_arguments,
    markdown,
    parse_common,
    speedups,
)
from _library import CACHES, DEFAULT_SCHEDULE
from _pictures import Panel, draw
from _real_models import WHEELS
from _real_models import load as load_real
from _subjects import DTYPES, Subject, encode, load_pair, random_model, read_prompts

from hf_speculate.tools.bench.decoding import Batch
from hf_speculate.tools.bench.methods import Method
from models import model_folder

NAME = "never_slower"
BUNDLED = "pair"  # the target with a bundled draft
TARGETS = (BUNDLED, *WHEELS)
DRAFTS = ("bundled", "random", "large")
MODES = ("greedy", "sampling")
ALL = "all"  # prompts of every category, in turn
# A constant K is timed if it reaches this fraction of the speed of plain decoding in the noisy
# probe.
MIN_PROBE = 0.95
Row = dict[str, Any]


class Cell(NamedTuple):
    """One combination of settings, measured together."""

    max_new_tokens: int
    draft: str
    batch_size: int
    category: str
    mode: str
    target: str = BUNDLED

    @property
    def is_there(self) -> bool:
        """Whether the target has such a draft, and the mode uses prompts from this category."""
        return (self.draft != "bundled" or self.target == BUNDLED) and (self.category == ALL) == (
            self.mode != "greedy"
        )


def cell_of(row: Row) -> Cell:
    named = (row[name] for name in Cell._fields[1:-1])
    return Cell(row.get("max_new_tokens", 256), *named, row.get("target", BUNDLED))


def load_subject(target: str, draft: str, dtype: str, device: torch.device) -> Subject:
    """Load a target with the named draft.

    If the target has no bundled draft, a random draft has half as many layers as the target.
    """
    if target == BUNDLED:
        return load_pair(dtype, device, draft)
    model = load_real(target, dtype).model.to(device)
    if draft == "large":
        return Subject(target, dtype, model, copy.deepcopy(model))
    config = copy.deepcopy(model.config)
    config.num_hidden_layers //= 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return Subject(target, dtype, model, random_model(config, dtype, device))


def prompts_of(category: str) -> list[str]:
    by_category = read_prompts()
    if category != ALL:
        return by_category[category]
    return list(chain.from_iterable(zip(*by_category.values(), strict=True)))


def constants_of(
    cell: Cell, runner: Runner, batch: Batch, args: argparse.Namespace
) -> list[Method]:
    """Return the constant values of K that are worth timing."""
    methods = [ours(draft_len) for draft_len in args.num_assistant_tokens]
    # A probe decodes only the beginning of each text, where the acceptance rate is lower than
    # later.
    if cell.draft == "bundled":
        return methods
    probe = Runner(runner.subject, runner.mode, args.probe_tokens, args.cache)
    warm_up(probe, [PLAIN_METHOD, *methods], batch)
    timings = Timings()
    timings.add(probe, [PLAIN_METHOD, *methods], batch, 2)
    return [
        method for method in methods if timings.summary(method)["decode_over_plain"] >= MIN_PROBE
    ]


def measure(subject: Subject, cell: Cell, args: argparse.Namespace) -> list[Row]:
    """Measure one cell, and return a row for the default and one for each timed constant K."""
    num_new, _, batch_size, category, mode, target = cell
    runner = Runner(subject, mode, num_new, args.cache)
    num_batches = args.repeats * (len(args.categories) if category == ALL else 1)
    prompts = list(islice(cycle(prompts_of(category)), num_batches * batch_size))
    folder = {} if target == BUNDLED else {"folder": model_folder(WHEELS[target])}
    batches = encode(prompts, batch_size, args.prompt_len, args.device, **folder)
    checked = check(runner, [DEFAULT], batches[0], max_new_tokens=args.probe_tokens)
    methods = [PLAIN_METHOD, DEFAULT, *constants_of(cell, runner, batches[0], args)]
    timings = Timings()
    for batch in batches:
        timings.add(runner, methods, batch, 1)
    plain_s = timings.plain_step_s(num_new)
    costs = measure_costs(subject, batches[0], num_new, plain_s)
    rows = []
    for method in methods[1:]:
        row: Row = {**cell._asdict(), "checked": checked}
        row |= {
            "schedule": DEFAULT_SCHEDULE if method == DEFAULT else "constant",
            "dtype": subject.dtype,
        }
        row |= timings.summary(method) | costs.report(timings.counts[method.name], batch_size)
        row["efficiency"] = row["decode_over_plain"] / row["expected"]
        rows.append(row)
    best = max(rows[1:], key=lambda row: row["over_plain"]["median"], default=None)
    rows[0]["best_constant"] = best and best["method"]
    rows[0]["best_constant_over_plain"] = best and best["over_plain"]["median"]
    if best is not None:
        fastest = fastest_elsewhere([timings.seconds[method.name] for method in methods[2:]])
        default = timings.seconds[DEFAULT.name]
        rows[0]["over_best_constant"] = speedups(fastest, default) | {
            "total": sum(fastest) / sum(default)
        }
    return rows


def fastest_elsewhere(constants: list[list[float]]) -> list[float]:
    """Return the time for each batch at the constant K that is fastest on the other batches.

    Args:
        constants: seconds by K and batch.

    Returns:
        Seconds by batch.
    """
    batch_indices = range(len(constants[0]))

    def seconds_elsewhere(seconds: list[float], batch_index: int) -> float:
        return median(seconds[:batch_index] + seconds[batch_index + 1 :] or seconds)

    return [
        min(constants, key=lambda seconds: seconds_elsewhere(seconds, batch_index))[batch_index]
        for batch_index in batch_indices
    ]


def share_of_best(row: Row) -> float | None:
    """Return the speed of the default over that of the best constant K; None if none was timed."""
    share: float | None = (
        row["over_best_constant"]["total"] if row.get("over_best_constant") else None
    )
    return share


COLUMNS = {
    "target": lambda row: cell_of(row).target,
    "new tokens": lambda row: cell_of(row).max_new_tokens,
    "rows": lambda row: row["batch_size"],
    "draft": lambda row: row["draft"],
    "prompts": lambda row: row["category"],
    "mode": lambda row: row["mode"],
    "method": lambda row: row["method"],
    "times plain (min to max)": lambda row: "{median:.2f} ({min:.2f} to {max:.2f})".format(
        **row["over_plain"]
    ),
    "best constant": lambda row: row["best_constant"],
    "it over plain": lambda row: row["best_constant_over_plain"],
    "default over it": share_of_best,
    "verified acceptance rate": lambda row: row["verified_acceptance_rate"],
    "K": lambda row: row["realised_k"],
    "mean acceptance length": lambda row: row["mean_acceptance_length"],
    "c": lambda row: row["c"],
    "v": lambda row: row["v"],
    "efficiency": lambda row: row["efficiency"],
}


def defaults_of(content: dict[str, Any]) -> list[Row]:
    """Return the row of the default schedule in every cell."""
    return [row for row in content["rows"] if row["num_assistant_tokens"] is None]


def table(content: dict[str, Any]) -> str:
    """Format the cells of the default schedule, and its worst cell."""
    rows = defaults_of(content)
    worst = min(rows, key=lambda row: row["over_plain"]["median"], default=None)
    if worst is None:
        return "no cell was measured"
    target, num_rows = cell_of(worst).target, worst["batch_size"]
    where = (
        f"{target}, {num_rows} rows, {worst['draft']} draft, {worst['category']}, {worst['mode']}"
    )
    line = f"Worst cell: {worst['over_plain']['median']:.2f} times plain ({where})."
    min_share = min(filter(None, map(share_of_best, rows)), default=None)
    if min_share is not None:
        line += f" Least share of the best constant K: {min_share:.2f}."
    return f"{line} A dash: no constant K kept up with plain decoding.\n\n{markdown(COLUMNS, rows)}"


def picture(rows: list[Row], path: Any) -> None:
    panels = []
    for target, draft in dict.fromkeys((cell_of(row).target, row["draft"]) for row in rows):
        cells = [row for row in rows if (cell_of(row).target, row["draft"]) == (target, draft)]
        names = [f"{row['category']}, {row['mode']}, {row['batch_size']}" for row in cells]
        best = [
            (name, row["best_constant_over_plain"]) for name, row in zip(names, cells, strict=True)
        ]
        series = {
            f"default ({DEFAULT_SCHEDULE})": list(
                zip(names, [row["over_plain"] for row in cells], strict=True)
            ),
            "best constant K": [(name, value) for name, value in best if value],
        }
        title = f"{draft} draft" if target == BUNDLED else f"{draft} draft of {target}"
        panels.append(Panel(title, "times plain generate()", series, 1.0))
    draw(path.with_suffix(".png"), panels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=3, limit_s=1500.0)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[BUNDLED])
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument(
        "--categories", nargs="+", choices=list(read_prompts()), default=list(read_prompts())
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-new-tokens", nargs="+", type=int, default=[256])
    parser.add_argument("--probe-tokens", type=int, default=32)
    parser.add_argument("--num-assistant-tokens", nargs="+", type=int, default=[1, 3, 5, 8])
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--cache", choices=CACHES, default="auto")
    add_argument_of_adding(parser)
    args = parse_common(parser)
    axes = (
        args.max_new_tokens,
        args.drafts,
        args.batch_sizes,
        [*args.categories, ALL],
        args.modes,
        args.targets,
    )
    cells = [cell for cell in map(Cell._make, product(*axes)) if cell.is_there]
    subjects = {
        (target, draft): load_subject(target, draft, args.dtype, args.device)
        for target, draft in dict.fromkeys((cell.target, cell.draft) for cell in cells)
    }
    walk, results = Cells(cells, args.limit_s, "cells"), Results(NAME, args, cell_of)
    for cell in walk:
        results.add(measure(subjects[cell.target, cell.draft], cell, args))
    args.left_out = walk.left_out
    path = results.write()
    print(table({"rows": results.rows}))
    picture(defaults_of({"rows": results.rows}), path)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
