"""Decode prompts from stdin with the library in a folder, as one side of `revisions.py`.

python benchmarks/_revision.py FOLDER DTYPE K MAX_NEW_TOKENS

K is a number, or `adaptive` for the default schedule. Each input line is `{"input_ids": [B, T],
"attention_mask": [B, T]}`, and each output line is `{"seconds", "token_ids"}`. This file works with
any revision of the library, so it imports no other module in this folder, which belong to one
revision.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

PAIR = Path(__file__).resolve().parents[1] / "examples" / "pair"


def main() -> None:
    folder, dtype, num_assistant_tokens, max_new_tokens = sys.argv[1:]
    sys.path.insert(0, folder)
    import hf_speculate

    if not Path(hf_speculate.__file__).is_relative_to(folder):
        raise SystemExit(
            f"hf_speculate was imported from {hf_speculate.__file__}, not from {folder}"
        )
    models = [
        AutoModelForCausalLM.from_pretrained(PAIR / name, dtype=dtype).eval()
        for name in ("target", "draft")
    ]
    for model in models:
        model.generation_config.eos_token_id = None  # every call generates all its tokens
    target, draft = hf_speculate.enable(models[0]), models[1]
    schedule = (
        {}
        if num_assistant_tokens == "adaptive"
        else {"num_assistant_tokens": int(num_assistant_tokens)}
    )
    for line in sys.stdin:
        inputs = {name: torch.tensor(values) for name, values in json.loads(line).items()}
        begin = time.perf_counter()
        token_ids = target.generate(
            **inputs,
            assistant_model=draft,
            **schedule,
            max_new_tokens=int(max_new_tokens),
            do_sample=False,
        )
        print(
            json.dumps({"seconds": time.perf_counter() - begin, "token_ids": token_ids.tolist()}),
            flush=True,
        )


if __name__ == "__main__":
    main()
