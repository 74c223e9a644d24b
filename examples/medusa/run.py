"""Decodes bundled prompts with Medusa heads through `generate()`, and compares it with plain decoding.

    cd examples && python -m medusa.run --prompts 8 --num-assistant-tokens 3

Both ways decode every prompt in turn, in alternating order. Then all prompts are decoded in one batch, and every row is
held against plain greedy decoding.
"""

import argparse
import functools
import time
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedTokenizerBase

import hf_speculate
from medusa.drafter import MedusaDrafter
from medusa.heads import MedusaHeads
from pair_training.prompts import read_prompts
from pair_training.store import load_model, load_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1]
WEIGHTS = Path(__file__).resolve().parent / "heads.safetensors"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def measure(
    target: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: list[str], options: dict, max_new_tokens: int
) -> tuple[list[float], list[hf_speculate.SpeculationStats]]:
    """Decode each prompt plainly and with drafts; how many times plain decoding's speed each ran, and its counts."""
    ratios, counts = [], []
    for index, prompt in enumerate(prompts):
        inputs = tokenizer(prompt, return_tensors="pt").to(target.device)
        stats, seconds = hf_speculate.SpeculationStats(), {}
        ways = {"plain": {}, "heads": {**options, "speculation_stats": stats}}
        for name in ways if index % 2 else reversed(ways):
            begin = time.perf_counter()
            target.generate(**inputs, **ways[name], do_sample=False, max_new_tokens=max_new_tokens)
            seconds[name] = time.perf_counter() - begin
        ratios.append(seconds["plain"] / seconds["heads"])
        counts.append(stats)
    return ratios, counts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=EXAMPLES / "pair" / "target")
    parser.add_argument("--heads", type=Path, default=WEIGHTS)
    parser.add_argument("--prompts", type=int, default=8, help="how many of the bundled ones")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-assistant-tokens", type=int, default=3, help="K, at most the number of heads")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    target = hf_speculate.enable(load_model(args.target, DTYPES[args.dtype], "cpu"))
    tokenizer = load_tokenizer(args.target)
    heads = MedusaHeads.load(args.heads, target)
    options = {
        "drafter": functools.partial(MedusaDrafter, heads),
        "num_assistant_tokens": args.num_assistant_tokens,
    }
    every = read_prompts(EXAMPLES / "prompts.jsonl")
    prompts = every[:: max(len(every) // args.prompts, 1)][: args.prompts]
    measure(target, tokenizer, prompts[:1], options, 8)  # warms up
    ratios, counts = measure(target, tokenizer, prompts, options, args.max_new_tokens)
    num_tokens, num_rounds = (sum(getattr(one, name) for one in counts) for name in ("num_emitted", "num_rounds"))
    print(f"{len(prompts)} prompts one by one, {args.dtype}, K = {args.num_assistant_tokens}")
    print(f"mean acceptance length {num_tokens / num_rounds:.2f}")
    print(f"times plain decoding's speed {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    report = hf_speculate.check_parity(
        target, None, prompts, tokenizer=tokenizer, max_new_tokens=args.max_new_tokens, **options
    )
    print(report)
    if not report.ok:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
