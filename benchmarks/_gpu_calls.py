"""Calls that the parts of `on_gpu.py` decode with."""

from typing import Any

import torch
from _gpu_device import Models
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def gap_to_argmax(models: Models, inputs: dict[str, Tensor], output: Tensor) -> float:
    """How far below the largest logit the chosen tokens lie at most, in one forward with math attention."""
    prompt_len, eos = inputs["input_ids"].shape[1], models.target.generation_config.eos_token_id
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(output[:, prompt_len:])], dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        logits = models.target(input_ids=output, attention_mask=mask, position_ids=positions).logits.float()
    chosen = output[:, prompt_len:, None]
    logits = logits[:, prompt_len - 1 : -1]
    gaps = logits.amax(-1) - logits.gather(-1, chosen)[..., 0]  # [B, N]
    if eos is not None:  # what follows an EOS token is padding
        is_end = torch.isin(chosen[..., 0], torch.tensor(eos, device=chosen.device))
        gaps = gaps.masked_fill((is_end.cumsum(1) - is_end.long()) > 0, 0.0)
    return float(gaps.max())
