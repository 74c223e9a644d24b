"""Count tokens per round for every sampling verifier on the bundled pair.

The counts are listed by temperature and by the sampling method of the draft.

    python benchmarks/acceptance.py --readme docs/verifiers.md

Nothing is timed, so other load on the machine does not matter. K is constant.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from _harness import ROOT, read_results, write_between, write_results
from _subjects import PAIR, load, read_batches
from tqdm import tqdm

import hf_speculate

VERIFIERS = ("rejection", "block", "coupled", "typical")
DRAFT_SAMPLING = ("sample", "argmax")


def measure(
    target: Any, draft: Any, temperature: float, verifier: str, sampling: str, args: Any
) -> dict[str, Any]:
    """Measure one cell: rounds and accepted and emitted tokens, over all prompts and seeds."""
    totals = {"num_rounds": 0, "num_verified": 0, "num_accepted": 0, "num_emitted": 0}
    for batch in read_batches(args.prompts, args.batch_size):
        for seed in range(args.seeds):
            stats = hf_speculate.SpeculationStats()
            hf_speculate.generate(
                target,
                **batch.inputs,
                assistant_model=draft,
                do_sample=True,
                top_k=0,
                temperature=temperature,
                verifier=verifier,
                draft_sampling=sampling,
                num_assistant_tokens=args.num_assistant_tokens,
                num_assistant_tokens_schedule="constant",
                max_new_tokens=args.max_new_tokens,
                seed=seed,
                speculation_stats=stats,
            )
            for name in totals:
                totals[name] += getattr(stats, name)
    return {
        "temperature": temperature,
        "verifier": verifier,
        "draft_sampling": sampling,
        "mean_acceptance_length": totals["num_emitted"] / totals["num_rounds"],
        **totals,
    }


def table(results: dict[str, Any]) -> str:
    """Format the table in docs/verifiers.md."""
    rows, args, environment = results["rows"], results["arguments"], results["environment"]
    temperatures = sorted({row["temperature"] for row in rows})
    columns = [
        (sampling, temperature) for sampling in DRAFT_SAMPLING for temperature in temperatures
    ]
    heads = [
        f"draft {'samples' if sampling == 'sample' else 'argmax'}, T {heat:g}"
        for sampling, heat in columns
    ]
    made_of = (
        f"{args['prompts']} prompts, {args['seeds']} seeds, {args['max_new_tokens']} new tokens"
    )
    lines = [
        ("Tokens per round of the bundled pair (accepted drafts and the bonus token), float32,"),
        f"K = {args['num_assistant_tokens']}, {made_of}, torch {environment['versions']['torch']}:",
        "",
        f"| verifier | {' | '.join(heads)} |",
        f"|---|{'---|' * len(heads)}",
    ]
    for verifier in VERIFIERS:
        cells = {
            (row["draft_sampling"], row["temperature"]): row
            for row in rows
            if row["verifier"] == verifier
        }
        figures = " | ".join(f"{cells[column]['mean_acceptance_length']:.2f}" for column in columns)
        lines.append(f"| `{verifier}` | {figures} |")
    lines += [
        "",
        (
            "Made by `python benchmarks/acceptance.py`; the counts are in "
            "`benchmarks/results/acceptance.json`."
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-assistant-tokens", type=int, default=5)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.5, 0.9, 1.2])
    parser.add_argument(
        "--readme",
        type=Path,
        help="only put the table of the last run between the marks of this file",
    )
    args = parser.parse_args()
    if args.readme is not None:
        write_between(args.readme, "acceptance", table(read_results("acceptance")))
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    target, draft = load(PAIR / "target", "float32"), load(PAIR / "draft", "float32")
    cells = [
        (temperature, verifier, sampling)
        for temperature in args.temperatures
        for verifier in VERIFIERS
        for sampling in DRAFT_SAMPLING
    ]
    rows = [measure(target, draft, *cell, args) for cell in tqdm(cells, desc="acceptance")]
    path = write_results("acceptance", args, rows)
    print(table(read_results("acceptance")))
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
