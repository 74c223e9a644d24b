"""Measure a saved pair on held-out text."""

import platform
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from training.pair.acceptance import Verdicts, verdicts_of, walk_rounds
from training.pair.corpus import list_sources, read_source, stdlib_root
from training.pair.pretrain import stream_loss
from training.pair.report import A_DRAFT_TOKENS
from training.pair.timing import MAX_ROWS, time_pair
from training.pair.tokens import encode_texts

BATCH_SIZES = (1, 8)
SAMPLE_PROMPT = (
    "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read(self):"
)
NUM_SAMPLE_TOKENS = 96


def walk_record(verdicts: Verdicts) -> dict:
    """Return the verified acceptance rate, the overlap and the walks at K = 1..8."""
    walks = [walk_rounds(verdicts.rows, draft_len) for draft_len in range(1, MAX_ROWS)]
    return {
        "verified_acceptance_rate": walks[A_DRAFT_TOKENS - 1].verified_acceptance_rate,
        "overlap": verdicts.overlap,
        "walks": [walk._asdict() | {"tokens_per_round": walk.tokens_per_round} for walk in walks],
    }


def acceptance_record(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    seed: int,
) -> dict:
    """Return the records for greedy decoding and sampling in one dtype."""
    return {
        "greedy": walk_record(verdicts_of(target, draft, tokenizer, prompts, None)),
        "sampling": walk_record(verdicts_of(target, draft, tokenizer, prompts, seed)),
    }


def timing_record(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> dict[str, dict]:
    """Return times, c and v by batch size; keys are strings, as in JSON."""
    record = {}
    for batch_size in BATCH_SIZES:
        timings = time_pair(target, draft, batch_size)
        record[str(batch_size)] = timings._asdict() | {
            "cost": timings.cost,
            "factors": timings.factors,
        }
    return record


def held_out_stream(tokenizer: PreTrainedTokenizerFast) -> tuple[np.ndarray, float]:
    """Return the tokens of the held-out modules, [N] uint16, and the tokens per character."""
    root = stdlib_root()
    texts = [read_source(root, name) for name in list_sources(root).held_out]
    stream = encode_texts(tokenizer, texts)
    return stream, len(stream) / sum(len(text) for text in texts)


def loss_record(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> dict:
    """Return the held-out losses of both models in nats per token."""
    stream, tokens_per_char = held_out_stream(tokenizer)
    losses = {"target": stream_loss(target, stream), "draft": stream_loss(draft, stream)}
    return losses | {"tokens_per_char": tokens_per_char, "num_tokens": len(stream)}


def write_sample(target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a short prompt with a greedy continuation, up to its last complete line."""
    batch = tokenizer(SAMPLE_PROMPT, return_tensors="pt").to(target.device)
    ids = target.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=NUM_SAMPLE_TOKENS,
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True).rpartition("\n")[0].rstrip()


def machine_record(device: str) -> dict:
    """Return the conditions of the timings: device, threads and versions."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{cpu_name()} (CPU)"
    return {
        "device": name,
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def cpu_name() -> str:
    """Return the name of the processor, or its architecture if the name is unknown."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
