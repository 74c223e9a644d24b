"""A small target with a draft near it, made of random weights, and prompts."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_speculate.tools.doctor.site import Site

VOCAB_SIZE = 512
_SPREAD, _NOISE = 0.2, 0.05  # spread of weights, so that texts depend on the tokens read; noise of the draft's weights
_HEAD_WIDTH = 16
PROMPT_LENS = (24, 21, 9, 1)


class Pair(NamedTuple):
    """A target with its draft."""

    target: PreTrainedModel
    draft: PreTrainedModel


def make_pair(site: Site, dtype: torch.dtype) -> Pair:
    """The same pair at every call."""
    num_heads = site.width // _HEAD_WIDTH
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=site.width,
        intermediate_size=2 * site.width,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=max(num_heads // 4, 1),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = LlamaForCausalLM(config).eval()
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight, twin in zip(target.parameters(), draft.parameters(), strict=True):
            if weight.dim() > 1:
                spread = _SPREAD * (32 / site.width) ** 0.5
                weight.normal_(0.0, spread, generator=generator)
                noise = torch.empty_like(weight).normal_(0.0, _NOISE * spread, generator=generator)
                twin.copy_(weight + noise)
    pair = Pair(target, draft)
    module: Any
    for module in pair:
        module.to(site.device, dtype)
    return pair


def make_prompts(site: Site, batch_size: int) -> dict[str, Tensor]:
    """Left-padded prompts of several lengths, each with a text that stands twice, so that prompt lookup drafts."""
    generator = torch.Generator().manual_seed(batch_size)
    texts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator, device="cpu").repeat(2) for length in PROMPT_LENS
    ]
    texts = texts[:batch_size]
    num = max(map(len, texts))
    ids = torch.stack([torch.cat([text.new_zeros(num - len(text)), text]) for text in texts])
    return {"input_ids": ids.to(site.device), "attention_mask": (ids > 0).long().to(site.device)}
