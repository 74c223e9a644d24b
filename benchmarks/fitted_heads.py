"""Measure the bundled heads and the bundled draft model on the bundled target.

    python benchmarks/fitted_heads.py                        # all of it
    python benchmarks/fitted_heads.py --timed-prompts 0      # counts alone, free of timing noise
    python benchmarks/fitted_heads.py --readme docs/heads.md # put the last results into the page

The script measures mean acceptance lengths and the speed for one row. K is constant. Decoding is
greedy, or it samples at temperature 1 with the verifier "rejection", with drafted tokens that are
sampled ("sample") or point masses ("argmax"). The speed is that of greedy decoding over plain
decoding of the same row, measured alternately.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from _harness import (
    add_common_arguments,
    alternate_patiently,
    markdown,
    parse_common,
    read_results,
    result_name,
    spread,
    write_between,
    write_results,
)
from _subjects import PAIR, load, read_batches
from tqdm import tqdm
from transformers import PreTrainedModel

import hf_speculate

NAME = "fitted_heads"
# The values are folders in examples/heads.
HEADS = {"EAGLE-3": "eagle3", "DFlash": "dflash", "DFlash 2": "dflash2"}
DRAFT_MODEL = "draft model"
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 0, "verifier": "rejection", "draft_sampling": "sample"},
    "argmax": {"do_sample": True, "top_k": 0, "verifier": "rejection", "draft_sampling": "argmax"},
}


def options_of(draft: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the `generate()` arguments for calls with a draft."""
    schedule = {
        "num_assistant_tokens": args.num_assistant_tokens,
        "num_assistant_tokens_schedule": "constant",
    }
    return {"assistant_model": draft, "max_new_tokens": args.max_new_tokens, **schedule}


def mean_acceptance_length(
    target: PreTrainedModel, draft: Any, method: str, args: argparse.Namespace
) -> float:
    """Return the emitted tokens per row and round, over all prompts and, if sampling, all seeds."""
    num_emitted = num_rounds = 0
    for batch in read_batches(args.prompts, args.batch_size, device=args.device):
        for seed in range(args.seeds if METHODS[method]["do_sample"] else 1):
            stats = hf_speculate.SpeculationStats()
            options = {
                **options_of(draft, args),
                **METHODS[method],
                "seed": seed,
                "speculation_stats": stats,
            }
            hf_speculate.generate(target, **batch.inputs, **options)
            num_emitted, num_rounds = num_emitted + stats.num_emitted, num_rounds + stats.num_rounds
    return num_emitted / num_rounds


def speeds(
    target: PreTrainedModel, drafts: dict[str, Any], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Measure the speed-up of greedy decoding over plain decoding of the same row, by draft.

    Returns an empty dict if no prompt is timed.
    """
    ratios: dict[str, list[float]] = {name: [] for name in drafts}
    for batch in (
        read_batches(args.timed_prompts, 1, device=args.device) if args.timed_prompts else []
    ):
        options = {**batch.inputs, "max_new_tokens": args.max_new_tokens, "do_sample": False}
        calls = {"plain": partial(target.generate, **options)}
        for name, draft in drafts.items():
            calls[name] = partial(
                hf_speculate.generate, target, **options | options_of(draft, args)
            )
        seconds, _ = alternate_patiently(calls, args.repeats + 1, NAME)
        for name in drafts:
            ratios[name] += [
                plain / ours
                for plain, ours in zip(seconds["plain"][1:], seconds[name][1:], strict=True)
            ]
    return {name: spread(draft_ratios) for name, draft_ratios in ratios.items() if draft_ratios}


COLUMNS = {
    "draft": lambda row: row["draft"],
    "MB of its own": lambda row: f"{row['num_bytes'] / 1e6:.1f}",
    "greedy": lambda row: row["greedy"],
    "T = 1, drawn": lambda row: row["sample"],
    "T = 1, point masses": lambda row: row["argmax"],
    "speed of one row": lambda row: (
        "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["speed"]) if row["speed"] else None
    ),
}


def table(content: dict[str, Any]) -> str:
    """Format mean acceptance lengths by draft and method, and the measured speeds."""
    args = content["arguments"]
    note = (
        f"Tokens per round, K = {args['num_assistant_tokens']}, {args['prompts']} prompts, float32."
    )
    return f"{note}\n\n{markdown(COLUMNS, content['rows'])}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=3, limit_s=1200)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-assistant-tokens", type=int, default=5)
    parser.add_argument("--timed-prompts", type=int, default=8)
    parser.add_argument(
        "--readme",
        type=Path,
        help="only put the table of the last run between the marks of this file",
    )
    args = parse_common(parser)
    if args.readme is not None:
        write_between(args.readme, NAME, table(read_results(NAME)))
        return
    target = load(PAIR / "target", "float32", args.device)
    folder = PAIR.parent / "heads"
    drafts: dict[str, Any] = {
        name: hf_speculate.load_drafter(folder / head_folder, target)
        for name, head_folder in HEADS.items()
    }
    parts = {name: head.network for name, head in drafts.items()}
    drafts[DRAFT_MODEL] = parts[DRAFT_MODEL] = load(PAIR / "draft", "float32", args.device)
    measured = speeds(target, drafts, args)
    rows = []
    for name, draft in tqdm(drafts.items(), desc=NAME, disable=None):
        lens = {method: mean_acceptance_length(target, draft, method, args) for method in METHODS}
        num_bytes = sum(weight.nbytes for weight in parts[name].parameters())
        rows.append({"draft": name, "num_bytes": num_bytes, **lens, "speed": measured.get(name)})
    path = write_results(result_name(NAME, args.device), args, rows, args.results)
    print(table({"arguments": vars(args), "rows": rows}))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
