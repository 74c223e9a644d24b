"""Register a custom top-k verifier and compare it with greedy verification on the bundled pair.

    python examples/custom_verifier.py --num-likeliest 4

A drafted token is accepted if it is among the target's k most likely tokens. The token after the
accepted ones is the most likely token of the target or, with `do_sample=True`, a sample from its
distribution. The verifier is lossy, because the draft chooses which of the k tokens the output
contains.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate
from hf_speculate.kernels import sample
from hf_speculate.types import DraftOut, NoiseKeys, Stream, Verdict

EXAMPLES = Path(__file__).resolve().parent
NUM_LIKELIEST = 4


@dataclass(frozen=True)
class TopKVerifier:
    """Verifier that accepts the likeliest tokens.

    It accepts a drafted token among the `num_likeliest` most likely tokens of the target, including
    ties.
    """

    num_likeliest: int
    samples: bool  # whether to sample the token after the accepted ones

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        vocab_size = target_logits.shape[-1]
        # [B, K]; gather needs valid ids, and a drafted id may be invalid
        ids = draft.token_ids.clamp(0, vocab_size - 1)
        chosen = target_logits[:, :-1].gather(-1, ids[..., None])[..., 0]  # [B, K]
        # [B, K]
        bounds = target_logits[:, :-1].topk(min(self.num_likeliest, vocab_size)).values[..., -1]
        # [B, K+1]
        following = draw(target_logits, keys) if self.samples else target_logits.argmax(-1)
        return hf_speculate.keep_prefix(target_logits, draft, chosen >= bounds, following)


def draw(target_logits: Tensor, keys: NoiseKeys) -> Tensor:
    """Sample one token at each position of [B, K+1, V] and return [B, K+1] int64.

    Drafts use a different random stream.
    """
    positions = range(target_logits.shape[1])
    draws = [
        sample(
            target_logits[:, position],
            keys=keys._replace(positions=keys.positions + position),
            stream=Stream.CORRECTION,
        )
        for position in positions
    ]
    return torch.stack([result.token_ids for result in draws], dim=1)


def register(num_likeliest: int = NUM_LIKELIEST) -> None:
    """Register the verifier as "top_k", for `generate()` and for saved generation configs."""
    hf_speculate.register_verifier(
        "top_k",
        lambda config: TopKVerifier(num_likeliest, samples=config.typical_correction == "sample"),
        lossless=False,
        replace=True,
        reads_draft_logits=False,
    )


def measure(
    folder: Path, verifiers: list[str], max_new_tokens: int, num_assistant_tokens: int
) -> dict[str, hf_speculate.SpeculationStats]:
    """Decode eight bundled prompts in a batch with each verifier."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target", padding_side="left")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    )
    lines = (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["turns"][0] for line in lines[::4]][:8]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    results = {}
    for verifier in verifiers:
        results[verifier] = hf_speculate.SpeculationStats()
        hf_speculate.generate(
            target,
            **inputs,
            assistant_model=draft,
            verifier=verifier,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            num_assistant_tokens=num_assistant_tokens,
            speculation_stats=results[verifier],
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-likeliest", type=int, default=NUM_LIKELIEST, help="k")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--num-assistant-tokens", type=int, default=5)
    parser.add_argument("--pair", type=Path, default=EXAMPLES / "pair")
    args = parser.parse_args()
    register(args.num_likeliest)
    results = measure(
        args.pair, ["greedy", "top_k"], args.max_new_tokens, args.num_assistant_tokens
    )
    for name, stats in results.items():
        length, rate = stats.mean_acceptance_length, stats.acceptance_rate
        print(f"{name:8} mean acceptance length {length:.2f}, acceptance rate {rate:.3f}")


if __name__ == "__main__":
    main()
