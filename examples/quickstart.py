"""The shortest useful script: enable a model, decode a batch with a draft, look at what it did.

    python examples/quickstart.py

It decodes with the bundled pair; put names of your own, on the Hub or on disk, in place of the two folders.
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate

PAIR = Path(__file__).resolve().parent / "pair"
PROMPTS = ["def main():\n", "class Stack:\n    def push(self, item):\n"]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    model = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(PAIR / "target"))
    draft = AutoModelForCausalLM.from_pretrained(PAIR / "draft")

    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    stats = hf_speculate.SpeculationStats()
    output = model.generate(**inputs, assistant_model=draft, max_new_tokens=40, speculation_stats=stats)

    print("\n\n".join(tokenizer.batch_decode(output, skip_special_tokens=True)))
    print(f"\n{stats}")


if __name__ == "__main__":
    main()
