"""Decode a list of prompts in batches into a file, and resume after an interruption.

    python examples/batch.py

The first run is interrupted, and the second run resumes it. `hf-speculate batch TARGET
prompts.jsonl --output out.jsonl --draft DRAFT` does the same for files.
"""

import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate

PAIR = Path(__file__).parent / "pair"
PROMPTS = [
    "def main():\n",
    {"id": "stack", "prompt": "class Stack:\n", "tag": "class"},  # other fields are copied
    "import os\n\n",
    "def read_lines(path):\n",
    "class Queue:\n    def __init__(self):\n",
]


def show(report: hf_speculate.DatasetReport) -> None:
    print(
        f"{report.num_finished} of {report.num_rows}, {report.acceptance_rate:.0%} of the drafts "
        "accepted"
    )


def stop(report: hf_speculate.DatasetReport) -> None:
    show(report)
    if report.num_finished > 1:
        raise KeyboardInterrupt


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    target = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(PAIR / "target"))
    draft = AutoModelForCausalLM.from_pretrained(PAIR / "draft")
    options = {"assistant_model": draft, "max_new_tokens": 24, "batch_size": 2, "is_ordered": True}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.jsonl"
        try:
            hf_speculate.decode_dataset(
                target, tokenizer, PROMPTS, output, on_batch=stop, **options
            )
        except KeyboardInterrupt:
            print("interrupted")
        report = hf_speculate.decode_dataset(
            target, tokenizer, PROMPTS, output, on_batch=show, **options
        )
        print(f"{report.num_resumed} were there already")
        for result in report.results():
            print(
                f"\n{result['id']} ({result['finish_reason']}, {result['num_tokens']} "
                f"tokens)\n{result['text']}"
            )


if __name__ == "__main__":
    main()
