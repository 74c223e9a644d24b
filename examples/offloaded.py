"""Compare plain decoding, prompt lookup and hf_speculate for a model with its layers on disk.

    python examples/offloaded.py
    python examples/offloaded.py --tiny    # the bundled 7 M pair, without a download

A forward loads all weights, so reading eleven tokens takes about as long as reading one. The script
counts the bytes of the weights that forwards of the target load. If the page cache holds the
weights, the times include only copying them.
"""

import argparse
import tempfile
import time
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_speculate
from models import PAIR, load_models, model_folder

QUESTION = """Write this list again, in the same form, with the price of tea changed to 4 euros:

- coffee, 250 g, ground, fair trade, organic: 6 euros
- tea, 100 g, green, loose leaves, organic: 3 euros
- cocoa, 200 g, powder, without sugar, organic: 5 euros
- sugar, 500 g, brown, from cane, organic: 2 euros
"""
CODE = """import os


def read(path):
    with open(path) as file:
        return file.read()


def """


class Run(NamedTuple):
    """Result and cost of a call."""

    token_ids: torch.Tensor  # [N] new tokens
    seconds: float
    num_forwards: int  # forwards of the target


def load_offloaded(folder: Any, offload_folder: str) -> PreTrainedModel:
    """Load a model whose layers are offloaded to disk between forwards.

    The embeddings, final norm and LM head stay in memory.
    """
    in_memory = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        device_map={"model.layers": "disk", **dict.fromkeys(in_memory, "cpu")},
        offload_folder=offload_folder,
        local_files_only=True,
    )


def decode(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> Run:
    """Decode once, and count forwards of the target if no statistics count them."""
    stats, forwards = options.get("speculation_stats"), []
    hook = None if stats else model.register_forward_pre_hook(lambda *_: forwards.append(1))
    begin = time.perf_counter()
    output = model.generate(**inputs, do_sample=False, **options)
    seconds = time.perf_counter() - begin
    if hook is not None:
        hook.remove()
    num_forwards = stats.num_target_forwards if stats else len(forwards)
    return Run(output[0, inputs["input_ids"].shape[1] :], seconds, num_forwards)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode with a target whose layers lie on disk.")
    parser.add_argument("--tiny", action="store_true", help="decode with the bundled 7 M pair")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    models = load_models(is_tiny=args.tiny)
    prompt = models.prompts([CODE if models.is_tiny else QUESTION])[0]
    inputs = dict(models.tokenizer(prompt, return_tensors="pt"))
    lookup = {"prompt_lookup_num_tokens": 10}
    with tempfile.TemporaryDirectory() as folder:
        target = load_offloaded(PAIR / "target" if models.is_tiny else model_folder(), folder)
        num_bytes = sum(
            weight.numel() * weight.element_size()
            for weight in target.parameters()
            if weight.is_meta
        )
        print(f"{models.name}: {num_bytes / 1e6:,.0f} MB of weights on disk")
        options = {
            "max_new_tokens": args.max_new_tokens,
            "pad_token_id": models.tokenizer.pad_token_id,
        }
        runs = {"plain": decode(target, inputs, **options)}
        runs["transformers, prompt lookup"] = decode(target, inputs, **options, **lookup)
        hf_speculate.enable(target, **lookup)
        options["speculation_stats"] = hf_speculate.SpeculationStats()
        runs["hf_speculate, prompt lookup"] = decode(target, inputs, **options)
        if models.is_tiny:
            runs["hf_speculate, draft model"] = decode(target, inputs, **options, **models.options)
        plain = runs["plain"]
        for name, run in runs.items():
            speed, loaded = len(run.token_ids) / run.seconds, run.num_forwards * num_bytes / 1e9
            difference = "" if torch.equal(run.token_ids, plain.token_ids) else ", another text"
            print(
                f"{name}: {speed:.2f} tokens per second, {plain.seconds / run.seconds:.2f} times "
                "plain; "
                f"{run.num_forwards} forwards loaded {loaded:.1f} GB{difference}"
            )
        print(
            models.tokenizer.decode(
                runs["hf_speculate, prompt lookup"].token_ids, skip_special_tokens=True
            )
        )


if __name__ == "__main__":
    main()
