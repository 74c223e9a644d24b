"""Measure verification and rollback of recurrent states on a Qwen3.5 with eight random layers.

    python benchmarks/hybrids.py

The script compares the verification forward over K + 1 tokens with the unchanged forward of the
model over the same number of tokens. In the verification forward, mixers read one token at a time
and save their states. The script also times the rollback after verification, and compares complete
calls with plain decoding. In these calls, an oracle drafts a fixed number of correct tokens per
round.
"""

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from _harness import (
    Cells,
    Results,
    add_common_arguments,
    alternate,
    alternate_patiently,
    markdown,
    parse_common,
    settle_allocator,
    speedups,
    spread,
)
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

import hf_speculate
from hf_speculate.cache.layers import attention_layers
from hf_speculate.compat import CACHE_NAME
from hf_speculate.draft.base import DrafterSetup, DraftRequest
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.options.recurrent.kind import make_hybrid_cache
from hf_speculate.types import DraftOut

NAME = "hybrids"
Row = dict[str, Any]
# The values are the bytes allowed for states after each token. With a negative number, no states
# are saved, and a rollback recomputes them.
MODES = {"kept states": 1 << 60, "replay": -1}
# The sizes are those of the 2 B model in the family, except for its 24 layers and its vocabulary of
# 248,320.
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 32_768,
}


class Oracle:
    """Drafter that knows the text.

    The first `num_right` tokens of every draft are correct.
    """

    def __init__(self, texts: Tensor, num_right: int, vocab_size: int):
        self.texts = torch.nn.functional.pad(texts, (0, 64))  # [B, N]
        self.num_right, self.vocab_size = num_right, vocab_size

    def __call__(self, setup: DrafterSetup) -> "Oracle":
        # The first token after the prompt comes from the target.
        self.positions = torch.ones(len(self.texts), dtype=torch.int64)
        return self

    def draft(self, request: DraftRequest) -> DraftOut:
        num_tokens = request.num_draft_tokens
        if request.kept is not None:
            self.positions += request.kept.num_emitted.cpu()
        columns = self.positions[:, None] + torch.arange(num_tokens)
        ids = self.texts.gather(1, columns.to(self.texts.device))  # [B, K]
        is_wrong = torch.arange(num_tokens, device=ids.device) >= self.num_right
        ids = torch.where(is_wrong, (ids + 1) % self.vocab_size, ids)
        return DraftOut(
            ids,
            torch.full((len(ids),), num_tokens, dtype=torch.int32, device=ids.device),
            None,
            None,
        )

    def rows(self, indices: Sequence[int]) -> None:
        self.texts, self.positions = self.texts[list(indices)], self.positions[list(indices)]


def load(args: argparse.Namespace) -> PreTrainedModel:
    """Make the model on the device."""
    sizes = SIZES | {"hidden_size": args.hidden_size, "intermediate_size": args.intermediate_size}
    config = Qwen3_5TextConfig(num_hidden_layers=args.layers, max_position_embeddings=8192, **sizes)
    torch.set_default_dtype(getattr(torch, args.dtype))
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    torch.set_default_dtype(torch.float32)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return hf_speculate.enable(model.eval().requires_grad_(False))


def measure_forwards(model: PreTrainedModel, batch_size: int, args: argparse.Namespace) -> Row:
    """Time the forwards after a prompt, and the rollbacks after these forwards."""
    num_query, device = args.num_assistant_tokens + 1, args.device
    ids = torch.randint(
        1, SIZES["vocab_size"], (batch_size, args.prompt_len + num_query), device=device
    )
    prompt, query = ids.split([args.prompt_len, num_query], dim=1)
    model_cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(prompt, **{CACHE_NAME: model_cache}, use_cache=True)
    language_model = LanguageModel(model, keeps_states=False)
    caches = {
        name: make_hybrid_cache(model, None, batch_size, None, device, max_bytes)
        for name, max_bytes in MODES.items()
    }
    for cache in caches.values():
        language_model.forward(prompt, cache, logits_to_keep=1)
        cache.begin_recording()
    # Rows keep 1, 2, ... tokens, so one of four rows keeps all; a single row keeps all but two.
    accepted_lens = (
        [num_query - 2] if batch_size == 1 else [1 + row % num_query for row in range(batch_size)]
    )

    def plain_forward(length: int) -> None:
        with torch.inference_mode():
            model(query[:, :length], **{CACHE_NAME: model_cache}, use_cache=True)

    def prepare() -> None:
        for layer in attention_layers(model_cache.layers):
            layer.crop(args.prompt_len - layer.get_seq_length())
        for cache in caches.values():
            cache.crop(cache.num_columns - args.prompt_len)

    calls = {
        "one token": lambda: plain_forward(1),
        "own forward": lambda: plain_forward(num_query),
        **{
            name: lambda cache=cache: language_model.forward(query, cache)
            for name, cache in caches.items()
        },
    }
    alternate(calls, 2, prepare=prepare)
    seconds, num_held_up = alternate_patiently(
        calls, args.repeats, f"{batch_size} rows", prepare, args.patience
    )
    prepare()
    rollbacks = {}
    for name, cache in caches.items():

        def verify(cache: Any = cache) -> None:
            language_model.forward(query, cache)

        crop = {
            name: lambda cache=cache: cache.crop(
                [num_query - accepted_len for accepted_len in accepted_lens]
            )
        }
        alternate(crop, 2, prepare=verify)
        rollbacks |= alternate_patiently(
            crop, args.repeats, f"{batch_size} rows, rollback", verify, args.patience
        )[0]
        cache.release()
    return {
        "batch_size": batch_size,
        "num_held_up": num_held_up,
        "state_bytes": caches["replay"].states.num_bytes,
        "seconds": {name: spread(taken) for name, taken in seconds.items()},
        "forward_over_own": {
            name: speedups(seconds[name], seconds["own forward"]) for name in MODES
        },
        "rollback_s": {name: spread(taken) for name, taken in rollbacks.items()},
        "rollback_over_own": {
            name: median(rollbacks[name]) / median(seconds["own forward"]) for name in MODES
        },
    }


def measure_calls(model: PreTrainedModel, batch_size: int, args: argparse.Namespace) -> Row:
    """Time complete calls and plain decoding."""
    prompt = torch.randint(
        1, SIZES["vocab_size"], (batch_size, args.prompt_len), device=args.device
    )
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": args.max_new_tokens}
    plain = model.generate(prompt, **options)
    stats = hf_speculate.SpeculationStats()
    drafts = {
        "num_assistant_tokens": args.num_assistant_tokens,
        "num_assistant_tokens_schedule": "constant",
        "speculation_stats": stats,
    }

    def ours() -> Tensor:
        oracle = Oracle(plain[:, args.prompt_len :], args.num_right, SIZES["vocab_size"])
        return model.generate(prompt, **options, drafter=oracle, **drafts)

    # In float32, forwards over one token and over several round differently, and random weights
    # have near-ties.
    is_equal = torch.equal(plain, ours())
    calls = {"plain": lambda: model.generate(prompt, **options), "ours": ours}
    seconds, num_held_up = alternate_patiently(
        calls, args.repeats, f"{batch_size} rows, calls", patience=args.patience
    )
    return {
        "calls_held_up": num_held_up,
        "is_equal": is_equal,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "call_s": {name: spread(taken) for name, taken in seconds.items()},
        "call_over_plain": speedups(seconds["plain"], seconds["ours"]),
    }


COLUMNS = {
    "rows": lambda row: row["batch_size"],
    "one token, ms": lambda row: row["seconds"]["one token"]["median"] * 1e3,
    "K + 1 tokens, ms": lambda row: row["seconds"]["own forward"]["median"] * 1e3,
    **{
        f"{name}: forward": lambda row, name=name: f"{row['forward_over_own'][name]['median']:.2f}x"
        for name in MODES
    },
    **{
        f"{name}: rollback": lambda row, name=name: f"{row['rollback_over_own'][name]:.1%}"
        for name in MODES
    },
    "mean acceptance length": lambda row: row["mean_acceptance_length"],
    "over plain decoding": lambda row: f"{row['call_over_plain']['median']:.2f}x",
    "equal text": lambda row: row["is_equal"],
}
NOTES = """\
Forwards and rollbacks are given over the model's unchanged forward of K + 1 tokens. This forward
saves no states for a rollback.
"""


def table(content: dict[str, Any]) -> str:
    """Format all cells, and explain the columns."""
    return f"{NOTES}\n{markdown(COLUMNS, content['rows'])}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=11, limit_s=600.0)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--hidden-size", type=int, default=SIZES["hidden_size"], help="1024 in the 0.8 B model"
    )
    parser.add_argument(
        "--intermediate-size", type=int, default=SIZES["intermediate_size"], help="3584 there"
    )
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-assistant-tokens", type=int, default=4)
    parser.add_argument("--num-right", type=int, default=3, help="accepted tokens of each round")
    parser.add_argument(
        "--patience", type=int, default=10, help="repetitions of a run held up by other processes"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parse_common(parser)
    settle_allocator()
    model = load(args)
    walk = Cells([(size,) for size in args.batch_sizes], args.limit_s, "cells")
    results = Results(NAME, args)
    for (size,) in walk:
        results.add([measure_forwards(model, size, args) | measure_calls(model, size, args)])
    args.left_out = walk.left_out
    path = results.write()
    print(table({"rows": results.rows}))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
