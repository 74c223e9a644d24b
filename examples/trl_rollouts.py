"""Rollouts with a draft inside a trainer of TRL, without vLLM: the target's weights change between the steps.

    pip install trl
    python examples/trl_rollouts.py

A draft never changes the distribution of the rollouts, so that training is what it was; only the number of accepted
tokens falls as the target moves away from its draft. Nothing is kept of the target's weights from one call to the next.
"""

import argparse
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

if importlib.util.find_spec("trl") is None:
    raise SystemExit("trl is not installed; run: pip install trl")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

import hf_speculate

PAIR = Path(__file__).resolve().parent / "pair"
PROMPTS = ["def main():\n", "class Stack:\n", "import os\n\n", "def read_lines(path):\n"]


def add_draft(model: PreTrainedModel, draft: PreTrainedModel) -> list[hf_speculate.SpeculationStats]:
    """Let `model.generate()` draft, by whomever it is called; returns the list that gets each call's statistics."""
    generate, calls = hf_speculate.enable(model).generate, []

    def generate_with_draft(*args: Any, **kwargs: Any) -> Any:
        calls.append(hf_speculate.SpeculationStats())
        return generate(*args, **kwargs, assistant_model=draft, speculation_stats=calls[-1])

    model.generate = generate_with_draft
    return calls


def num_words(completions: list[str], **_: Any) -> list[float]:
    """A reward: how many different words a text has."""
    return [float(len(set(text.split()))) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled target for a few steps.")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    target, draft = (AutoModelForCausalLM.from_pretrained(PAIR / name) for name in ("target", "draft"))
    before = target.get_output_embeddings().weight.detach().clone()
    calls = add_draft(target, draft)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=args.steps,
            learning_rate=1e-4,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=24,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * args.steps])
        GRPOTrainer(target, num_words, settings, data, processing_class=tokenizer).train()
    for step, stats in enumerate(calls, start=1):
        print(f"step {step}: {stats.acceptance_rate:.0%} of {stats.num_drafted} drafted tokens accepted")
    moved = float((target.get_output_embeddings().weight.detach() - before).norm())
    print(f"the weights moved: {moved > 0}")

    del target.generate  # the model's own method again
    target.eval()
    inputs = dict(tokenizer(PROMPTS, return_tensors="pt", padding=True))
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    plain = target.generate(**inputs, **options)
    drafted = target.generate(**inputs, **options, assistant_model=draft)
    print(f"greedy texts after training equal plain decoding's: {torch.equal(plain, drafted)}")


if __name__ == "__main__":
    main()
