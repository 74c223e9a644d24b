"""Measure the bundled EAGLE-3 head and the bundled draft model on held-out prompts.

    cd examples && python -m training.measure_eagle3    # writes heads/measurements.json

Decoding is greedy with constant K. The acceptance rate counts every prompt once. In each timed
pass, plain decoding, the draft model and the head take turns, prompt by prompt, on one row.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

import hf_speculate
from models import EAGLE3, PAIR, read_questions
from training.pair.evaluate import cpu_name
from training.pair.store import load_model, load_tokenizer

PROMPTS = PAIR.parent / "prompts.jsonl"


def encoded(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> dict[str, Tensor]:
    """Return a left-padded batch."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def measure_acceptance(
    target: LlamaForCausalLM,
    drafts: dict[str, Any],
    batch: dict[str, Tensor],
    args: argparse.Namespace,
) -> dict[str, dict[str, Any]]:
    """Measure acceptance rates and lengths, and count texts equal to plain decoding, by draft."""
    plain = target.generate(**batch, max_new_tokens=args.max_new_tokens, do_sample=False)
    records = {}
    for name, draft in drafts.items():
        stats = hf_speculate.SpeculationStats()
        texts = _decoded(target, draft, batch, args, speculation_stats=stats)
        records[name] = {
            "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
            "acceptance_rate_per_position": _rounded(stats.acceptance_rate_per_position),
            "verified_acceptance_rate_per_position": _rounded(
                stats.verified_acceptance_rate_per_position
            ),
            "texts_equal_to_plain": int((texts == plain).all(dim=1).sum()),
        }
    return records


def measure_times(
    target: LlamaForCausalLM,
    drafts: dict[str, Any],
    rows: list[dict[str, Tensor]],
    args: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """Measure the speed-up over plain decoding by draft, in each pass over the prompts.

    Returns:
        Median, minimum and maximum over passes.
    """
    methods: dict[str, Any] = {"plain": None, **drafts}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for number in tqdm(range(args.passes + 1), desc="passes"):
        pass_s = dict.fromkeys(methods, 0.0)
        for row in rows:
            for name, draft in methods.items():
                begin = time.perf_counter()
                if draft is None:
                    target.generate(**row, max_new_tokens=args.max_new_tokens, do_sample=False)
                else:
                    _decoded(target, draft, row, args)
                pass_s[name] += time.perf_counter() - begin
        if number:  # the first pass warms up
            for name, spent_s in pass_s.items():
                seconds[name].append(spent_s)
    ratios_by_draft = {}
    for name in drafts:
        ratios = [plain / ours for plain, ours in zip(seconds["plain"], seconds[name], strict=True)]
        ratios_by_draft[name] = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
    return {
        name: {key: round(value, 3) for key, value in ratios.items()}
        for name, ratios in ratios_by_draft.items()
    }


def _rounded(rates: list[float]) -> list[float]:
    return [round(rate, 3) for rate in rates]


def _decoded(
    target: LlamaForCausalLM,
    draft: Any,
    row: dict[str, Tensor],
    args: argparse.Namespace,
    **more_options: Any,
) -> Tensor:
    options = {
        "num_assistant_tokens": args.num_assistant_tokens,
        "num_assistant_tokens_schedule": "constant",
        **more_options,
    }
    return hf_speculate.generate(
        target,
        **row,
        assistant_model=draft,
        max_new_tokens=args.max_new_tokens,
        do_sample=False,
        **options,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", type=Path, default=EAGLE3)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--timed-prompts", type=int, default=8, help="how many of them are timed")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-assistant-tokens", type=int, default=5, help="K")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--output", type=Path, default=EAGLE3.parent / "measurements.json")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    transformers.logging.set_verbosity_error()
    target = load_model(PAIR / "target")
    tokenizer, prompts = load_tokenizer(PAIR / "target"), read_questions(PROMPTS, args.prompts)
    rows = [encoded(tokenizer, [prompt]) for prompt in prompts[: args.timed_prompts]]
    drafts = {
        "EAGLE-3 head": hf_speculate.load_drafter(args.head, target),
        "draft model": load_model(PAIR / "draft"),
    }
    results = {
        "num_prompts": len(prompts),
        "num_timed_prompts": len(rows),
        "max_new_tokens": args.max_new_tokens,
        "num_assistant_tokens": args.num_assistant_tokens,
        "acceptance": measure_acceptance(target, drafts, encoded(tokenizer, prompts), args),
        "speed_up": measure_times(target, drafts, rows, args),
        "device": f"{cpu_name()} (CPU)",
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
