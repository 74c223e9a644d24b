"""Pipelines of transformers that draft: prompts in batches, a chat, tokens as they come.

    python examples/pipeline.py

`automatic-speech-recognition` takes `assistant_model=` in the same place, with `num_beams=1`, as it would search beams
by default; `image-text-to-text` takes it in `generate_kwargs`.
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline

import hf_speculate

PAIR = Path(__file__).parent / "pair"
PROMPTS = ["def main():\n", "class Stack:\n", "import os\n\n"]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    target = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(PAIR / "target"))
    draft = AutoModelForCausalLM.from_pretrained(PAIR / "draft")
    # 4 tokens a round, for every call: left out, their number follows what the rounds before took and kept.
    write = pipeline(
        "text-generation", model=target, tokenizer=tokenizer, assistant_model=draft, num_assistant_tokens=4
    )

    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 32, "return_full_text": False}
    outputs = write(PROMPTS, batch_size=len(PROMPTS), do_sample=False, speculation_stats=stats, **options)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(prompt + output[0]["generated_text"], end="\n\n")
    print(f"a batch: {stats}\n")

    (drawn,) = write(PROMPTS[0], do_sample=True, verifier="coupled", seed=1, speculation_stats=stats, **options)
    print(PROMPTS[0] + drawn["generated_text"])
    print(f"\ndrawn: {stats}\n")

    # Messages go through the tokenizer's chat template; the bundled model knows none, so it is given one here.
    tokenizer.chat_template = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
    chat = [{"role": "user", "content": "a function that sorts a list"}]
    streamer = TextStreamer(tokenizer, skip_prompt=True)  # one row only
    write(chat, do_sample=False, streamer=streamer, speculation_stats=stats, max_new_tokens=32)
    print(f"\na chat: {stats}")


if __name__ == "__main__":
    main()
