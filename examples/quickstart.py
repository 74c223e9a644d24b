"""Enable a model, decode a batch with drafts, and print the statistics.

    python examples/quickstart.py
    python examples/quickstart.py --tiny    # the bundled 7 M pair, without a download

With your own models, `models.options` becomes `{"assistant_model":
AutoModelForCausalLM.from_pretrained(<draft>)}`, and `models.target` becomes
`hf_speculate.enable(AutoModelForCausalLM.from_pretrained(<target>))`.
"""

import argparse

import hf_speculate
from models import load_models


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode a batch with drafts.")
    parser.add_argument("--tiny", action="store_true", help="decode with the bundled 7 M pair")
    models = load_models(is_tiny=parser.parse_args().tiny)
    inputs = models.tokenizer(models.prompts(models.questions), return_tensors="pt", padding=True)
    inputs = inputs.to(models.target.device)
    stats = hf_speculate.SpeculationStats()
    output = models.target.generate(
        **inputs, **models.options, max_new_tokens=80, speculation_stats=stats
    )

    answers = models.tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    for question, answer in zip(models.questions, answers, strict=True):
        print(f"{question.rstrip()}\n{answer}\n")
    print(stats)


if __name__ == "__main__":
    main()
