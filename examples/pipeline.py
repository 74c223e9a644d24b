"""Run transformers pipelines with drafts: prompts in batches, a chat, a token stream.

    python examples/pipeline.py
    python examples/pipeline.py --tiny    # the bundled 7 M pair, without a download

`automatic-speech-recognition` takes `assistant_model=` in the same place, and needs `num_beams=1`
because its default is beam search; `image-text-to-text` takes it in `generate_kwargs`.
"""

import argparse

from transformers import TextStreamer, pipeline

import hf_speculate
from models import load_models


def main() -> None:
    parser = argparse.ArgumentParser(description="Run pipelines with drafts.")
    parser.add_argument("--tiny", action="store_true", help="decode with the bundled 7 M pair")
    models = load_models(is_tiny=parser.parse_args().tiny)
    prompts = models.prompts(models.questions)
    # Every round drafts 4 tokens. Without this option, the number adapts from round to round.
    drafting = {**models.options, "num_assistant_tokens": 4}
    write = pipeline("text-generation", model=models.target, tokenizer=models.tokenizer, **drafting)

    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 64, "return_full_text": False}
    outputs = write(
        prompts, batch_size=len(prompts), do_sample=False, speculation_stats=stats, **options
    )
    for question, output in zip(models.questions, outputs, strict=True):
        print(f"{question.rstrip()}\n{output[0]['generated_text']}", end="\n\n")
    print(f"a batch: {stats}\n")

    (drawn,) = write(
        prompts[0], do_sample=True, verifier="coupled", seed=1, speculation_stats=stats, **options
    )
    print(f"{models.questions[0].rstrip()}\n{drawn['generated_text']}")
    print(f"\ndrawn: {stats}\n")

    chat = [{"role": "user", "content": "Write a Python function that sorts a list."}]
    # A streamer supports only one row.
    streamer = TextStreamer(models.tokenizer, skip_prompt=True, skip_special_tokens=True)
    write(chat, do_sample=False, streamer=streamer, speculation_stats=stats, max_new_tokens=64)
    print(f"\na chat: {stats}")


if __name__ == "__main__":
    main()
