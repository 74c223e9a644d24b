"""Calls that the parts of `on_gpu.py` decode with."""

from typing import Any

import torch
from _gpu_device import Models
from torch import Tensor

import hf_speculate

K = 5
CONSTANT: dict[str, Any] = {"num_assistant_tokens": K, "num_assistant_tokens_schedule": "constant"}
DRAFTERS: dict[str, dict[str, Any]] = {"model": CONSTANT, "lookup": {"prompt_lookup_num_tokens": K}}
GRAPHS = {"speculation_graphs": "on"}
EAGER = {"speculation_graphs": "off"}


def decode(models: Models, inputs: dict[str, Tensor], drafter: str, **options: Any) -> Tensor:
    """Token ids [B, T + N] of our decoding; `drafter` is a key of `DRAFTERS`."""
    if drafter == "model":
        options["assistant_model"] = models.draft
    ids: Tensor = hf_speculate.generate(models.target, **inputs, **options)
    return ids


def repeated_prompts(models: Models, batch_size: int) -> dict[str, Tensor]:
    """Left-padded prompts in which a text stands twice, so that lookup drafts; every second one is shorter."""
    generator = torch.Generator().manual_seed(batch_size)
    most = min(models.target.config.vocab_size, 4096)
    texts = [torch.randint(3, most, (20 - 3 * (row % 2),), generator=generator).repeat(2) for row in range(batch_size)]
    ids = torch.stack([torch.cat([text.new_zeros(40 - len(text)), text]) for text in texts])
    return {"input_ids": ids.to("cuda:0"), "attention_mask": (ids > 0).long().to("cuda:0")}
