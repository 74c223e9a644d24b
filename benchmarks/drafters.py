"""Count mean acceptance lengths of prompt lookup, the bundled draft model, and both together.

    python benchmarks/drafters.py

The lengths are listed by prompt category. Nothing is timed, so other load on the machine does not
matter. K is constant. Forwards of the draft model are counted, because the hybrid also saves
forwards in rounds with only copies. A round costs one forward of the target and those of the draft;
a draft forward is priced at the ratio of draft parameters to target parameters.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from _harness import RESULTS, markdown, write_results
from _subjects import PAIR, encode, load, read_prompts
from tqdm import tqdm

import hf_speculate
from hf_speculate.engine.step_weights import cost_ratio
from hf_speculate.models.foreign_code import KNOWN_PACKAGES

# The hooks in this file count forwards or treat each token independently.
KNOWN_PACKAGES.add(__name__.partition(".")[0])

NAME = "drafters"
DRAFTERS = ("copying", "model", "hybrid")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 0.7},
}


class Calls:
    """Counter for the forwards of a model."""

    def __init__(self, model: Any):
        self.num = 0
        model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num += 1


def measure(
    models: tuple[Any, Any], calls: Calls, category: str, mode: str, drafter: str, args: Any
) -> dict[str, Any]:
    """Measure one cell: rounds and accepted and emitted tokens, over all prompts in a category."""
    target, draft = models
    options = {**MODES[mode], "num_assistant_tokens_schedule": "constant"}
    if drafter != "copying":
        options |= {"assistant_model": draft, "num_assistant_tokens": args.num_assistant_tokens}
    if drafter != "model":
        options["prompt_lookup_num_tokens"] = args.prompt_lookup_num_tokens
    totals = {
        "num_rounds": 0,
        "num_drafted": 0,
        "num_accepted": 0,
        "num_emitted": 0,
        "num_batch_rounds": 0,
    }
    calls.num = 0
    for batch in encode(read_prompts()[category][: args.prompts], args.batch_size):
        stats = hf_speculate.SpeculationStats()
        hf_speculate.generate(
            target,
            **batch.inputs,
            **options,
            max_new_tokens=args.max_new_tokens,
            seed=0,
            speculation_stats=stats,
        )
        for name in totals:
            totals[name] += getattr(stats, name)
    return {
        "category": category,
        "mode": mode,
        "drafter": drafter,
        "mean_acceptance_length": totals["num_emitted"] / totals["num_rounds"],
        "draft_forwards_per_round": calls.num / totals["num_batch_rounds"],
        "draft_cost": cost_ratio(target, draft),
        **totals,
    }


COLUMNS = {
    "mode": lambda row: row["mode"],
    "category": lambda row: row["category"],
    "drafter": lambda row: {"copying": "prompt lookup", "model": "draft model"}.get(
        row["drafter"], "both"
    ),
    "mean acceptance length": lambda row: row["mean_acceptance_length"],
    "drafted per round": lambda row: row["num_drafted"] / row["num_rounds"],
    "draft model's forwards per round": lambda row: row["draft_forwards_per_round"],
    "target forwards per token, in time": lambda row: cost_per_token(row),
}


def cost_per_token(row: dict[str, Any]) -> float:
    """Return the cost of a token in target forwards."""
    return (1 + row["draft_cost"] * row["draft_forwards_per_round"]) / row["mean_acceptance_length"]


def table(content: dict[str, Any]) -> str:
    """Format every cell."""
    return markdown(COLUMNS, content["rows"])


def over_better(rows: list[dict[str, Any]]) -> list[float]:
    """Return the mean acceptance length of the hybrid over that of the better part, by cell."""
    cells = _by_cell(rows, lambda row: row["mean_acceptance_length"])
    return [
        by_drafter["hybrid"] / max(by_drafter["copying"], by_drafter["model"])
        for by_drafter in cells
    ]


def cost_over_better(rows: list[dict[str, Any]]) -> list[float]:
    """Return the cost per token of the hybrid over that of the cheaper part, by cell."""
    cells = _by_cell(rows, cost_per_token)
    return [
        by_drafter["hybrid"] / min(by_drafter["copying"], by_drafter["model"])
        for by_drafter in cells
    ]


def _by_cell(
    rows: list[dict[str, Any]], figure: Callable[[dict[str, Any]], float]
) -> list[dict[str, float]]:
    """Return the values of a figure by drafter, for each mode and category."""
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        cells.setdefault((row["mode"], row["category"]), {})[row["drafter"]] = figure(row)
    return list(cells.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=10, help="of each category")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-assistant-tokens", type=int, default=5)
    parser.add_argument("--prompt-lookup-num-tokens", type=int, default=10)
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=list(MODES))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    models = load(PAIR / "target", "float32"), load(PAIR / "draft", "float32")
    calls = Calls(models[1])
    cells = [
        (category, mode, drafter)
        for mode in args.modes
        for category in sorted(read_prompts())
        for drafter in DRAFTERS
    ]
    rows = [measure(models, calls, *cell, args) for cell in tqdm(cells, desc=NAME, disable=None)]
    path = write_results(NAME, args, rows, args.results)
    print(table({"rows": rows}))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
