"""Generate rollouts that draft from earlier ones, inside a TRL trainer and without vLLM.

    pip install trl
    python examples/trl_rollouts.py
    python examples/trl_rollouts.py --without-trainer

Each of three epochs draws eight samples for each prompt. A `SuffixStore` keeps the samples with the
prompt as the key, and prompt lookup copies from samples for the same prompt. A draft never changes
the distribution of the rollouts, so training is unchanged. The weights of the target change between
calls, so no states are kept. `--without-trainer` generates rollouts from a fixed target and does
not need trl.
"""

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hf_speculate

PAIR = Path(__file__).resolve().parent / "pair"
PROMPTS = ["def main():\n", "class Stack:\n", "import os\n\n", "def read_lines(path):\n"]
NUM_SAMPLES, NUM_EPOCHS, NUM_NEW = 8, 3, 32
TEMPERATURE = 0.3


def num_words(completions: list[str], **_: Any) -> list[float]:
    """Return rewards: the number of distinct words in each text."""
    return [float(len(set(text.split()))) for text in completions]


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Train with TRL, whose trainer calls `model.generate()` for each prompt of an epoch."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            num_train_epochs=NUM_EPOCHS,
            learning_rate=1e-4,
            per_device_train_batch_size=NUM_SAMPLES,
            num_generations=NUM_SAMPLES,
            max_completion_length=NUM_NEW,
            temperature=TEMPERATURE,
            seed=0,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
        GRPOTrainer(model, num_words, settings, data, processing_class=tokenizer).train()


def draw(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Generate the same rollouts from a fixed target."""
    torch.manual_seed(0)
    options = {"max_new_tokens": NUM_NEW, "do_sample": True, "temperature": TEMPERATURE, "top_k": 0}
    for _ in range(NUM_EPOCHS):
        for prompt in PROMPTS:
            inputs = dict(tokenizer([prompt] * NUM_SAMPLES, return_tensors="pt"))
            model.generate(**inputs, **options, pad_token_id=tokenizer.pad_token_id)


def tokens_per_forward(calls: list[hf_speculate.SpeculationStats]) -> list[float]:
    """Return the number of tokens per row and target forward, for each epoch."""
    size = len(calls) // NUM_EPOCHS
    epochs = [
        sum(calls[begin + 1 : begin + size], calls[begin])
        for begin in range(0, size * NUM_EPOCHS, size)
    ]
    return [stats.mean_acceptance_length for stats in epochs]


def run(
    rollouts: Callable[[PreTrainedModel, PreTrainedTokenizerBase], None],
    tokenizer: PreTrainedTokenizerBase,
    store: hf_speculate.SuffixStore | None = None,
) -> tuple[PreTrainedModel, list[float]]:
    """Run `rollouts` on a new target.

    Returns:
        The target, trained if `rollouts` trains it, and the mean tokens per forward for each epoch.
    """
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target")
    calls: list[hf_speculate.SpeculationStats] = []
    hf_speculate.enable(
        model,
        prompt_lookup_num_tokens=10,
        suffix_store=store,
        speculation_stats=calls.append,
    )
    rollouts(model, tokenizer)
    return model.eval(), tokens_per_forward(calls)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw rollouts of the bundled target, and train it with them."
    )
    parser.add_argument(
        "--without-trainer", action="store_true", help="draw rollouts only; needs no trl"
    )
    args = parser.parse_args()
    if not args.without_trainer and importlib.util.find_spec("trl") is None:
        raise SystemExit("trl is not installed; run: pip install trl, or add --without-trainer")
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    rollouts, store = draw if args.without_trainer else train, hf_speculate.SuffixStore(key=tuple)
    _, without = run(rollouts, tokenizer)
    target, with_store = run(rollouts, tokenizer, store)
    for epoch, (alone, stored) in enumerate(zip(without, with_store, strict=True), start=1):
        figures = f"{alone:.2f} without the store, {stored:.2f} with it"
        print(f"epoch {epoch}: tokens per target forward {figures}")

    inputs = dict(tokenizer(PROMPTS, return_tensors="pt", padding=True))
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    drafted = target.generate(**inputs, **options)
    with hf_speculate.plain(target):
        plain = target.generate(**inputs, **options)
    print(f"greedy texts of the target equal plain decoding's: {torch.equal(plain, drafted)}")


if __name__ == "__main__":
    main()
