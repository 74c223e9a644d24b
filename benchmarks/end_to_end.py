"""Plain, transformers' assisted and speculative `generate()` on the bundled pair, greedy, alternating in one process.

    python benchmarks/end_to_end.py --prompts 8 --repeats 3

Every text is checked against plain `generate` before it counts. K is the same for both engines. transformers' assisted
generation takes one row, so a batch is compared with plain batched decoding and with assisted decoding row by row.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from _harness import ROOT, alternate, ratios, spread, write_results
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_speculate

PAIR = ROOT / "examples" / "pair"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Inputs = dict[str, Tensor]


def load(folder: Path, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()


def with_constant_k(draft: PreTrainedModel, num_assistant_tokens: int) -> PreTrainedModel:
    """The same weights with a generation config that makes transformers draft exactly K tokens."""
    fixed = copy.copy(draft)
    fixed.generation_config = copy.deepcopy(draft.generation_config)
    fixed.generation_config.update(
        num_assistant_tokens=num_assistant_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return fixed


def read_batches(num_prompts: int, batch_size: int) -> list[Inputs]:
    """Left-padded batches of prompts from every category in turn."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    lines = (ROOT / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["turns"][0] for line in lines]
    step = max(len(prompts) // num_prompts, 1)
    prompts = prompts[::step][:num_prompts]
    batches = []
    for begin in range(0, len(prompts), batch_size):
        batches.append(tokenizer(prompts[begin : begin + batch_size], return_tensors="pt", padding=True))
    return batches


def row_by_row(target: PreTrainedModel, draft: PreTrainedModel, inputs: Inputs, options: dict[str, Any]) -> None:
    """Assisted generation as transformers has it, one row after the other, as its users do for a batch."""
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        target.generate(ids[mask.bool()][None], assistant_model=draft, **options)


def is_same_text(target: PreTrainedModel, draft: PreTrainedModel, inputs: Inputs, options: dict, own: dict) -> bool:
    plain = target.generate(**inputs, **options)
    ours = hf_speculate.generate(target, **inputs, assistant_model=draft, **own, **options)
    return torch.equal(plain, ours)


def measure(dtype: str, batch_size: int, num_assistant_tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    target, draft = load(PAIR / "target", dtype), load(PAIR / "draft", dtype)
    fixed = with_constant_k(draft, num_assistant_tokens)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    own = {"num_assistant_tokens": num_assistant_tokens, "num_assistant_tokens_schedule": "constant"}
    seconds: dict[str, list[float]] = {"plain": [], "transformers": [], "hf_speculate": []}
    total, same, batches = hf_speculate.SpeculationStats(), 0, read_batches(args.prompts, batch_size)
    for inputs in batches:
        same += is_same_text(target, draft, inputs, options, own)
        ways = {
            "plain": lambda inputs=inputs: target.generate(**inputs, **options),
            "transformers": lambda inputs=inputs: row_by_row(target, fixed, inputs, options),
            "hf_speculate": lambda inputs=inputs: hf_speculate.generate(
                target, **inputs, assistant_model=draft, speculation_stats=total, **own, **options
            ),
        }
        description = f"{dtype}, {batch_size} rows, K = {num_assistant_tokens}"
        for name, values in alternate(ways, args.repeats, description).items():
            seconds[name] += values
    return {
        "dtype": dtype,
        "batch_size": batch_size,
        "num_assistant_tokens": num_assistant_tokens,
        "same_text": f"{same} of {len(batches)} batches",
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "over_plain": ratios(seconds["plain"], seconds["hf_speculate"]),
        "over_transformers": ratios(seconds["transformers"], seconds["hf_speculate"]),
        "transformers_over_plain": ratios(seconds["plain"], seconds["transformers"]),
        "last_call": str(total),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["float32"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--num-assistant-tokens", nargs="+", type=int, default=[3, 5, 8])
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    print(f"{'dtype':<10}{'rows':>5}{'K':>4}  {'over plain (min/median/max)':<30}{'over transformers':<24}same text")
    for dtype in args.dtypes:
        for batch_size in args.batch_sizes:
            for num in args.num_assistant_tokens:
                row = measure(dtype, batch_size, num, args)
                rows.append(row)
                plain, theirs = (
                    "/".join(f"{row[name][key]:.2f}" for key in ("min", "median", "max"))
                    for name in ("over_plain", "over_transformers")
                )
                print(f"{dtype:<10}{batch_size:>5}{num:>4}  {plain:<30}{theirs:<24}{row['same_text']}", flush=True)
    print(f"written to {write_results('end_to_end', args, rows).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
