"""Speculative decoding with a top-k rule of this repository's own, as a `custom_generate` function."""

from dataclasses import dataclass

import torch
from torch import Tensor

import hf_speculate
from hf_speculate.triton_kernels import sample
from hf_speculate.types import DraftOut, NoiseKeys, Stream, Verdict

NUM_LIKELIEST = 4
# transformers copies this file alone and does not say where from, so the fields of ../generation_config.json stand
# here as well. What the call sets itself goes first.
FIELDS = {
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "constant",
    "verifier": "top_k",
}


@dataclass(frozen=True)
class TopKVerifier:
    """Keeps drafted tokens while each is among the `num_likeliest` of the target; ties at the border stay."""

    num_likeliest: int
    samples: bool  # whether the token after the kept ones is drawn

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        vocab_size = target_logits.shape[-1]
        ids = draft.token_ids.clamp(0, vocab_size - 1)  # [B, K], for gather: a drafted id may be none
        chosen = target_logits[:, :-1].gather(-1, ids[..., None])[..., 0]  # [B, K]
        bounds = target_logits[:, :-1].topk(min(self.num_likeliest, vocab_size)).values[..., -1]  # [B, K]
        following = draw(target_logits, keys) if self.samples else target_logits.argmax(-1)  # [B, K+1]
        return hf_speculate.keep_prefix(target_logits, draft, chosen >= bounds, following)


def draw(target_logits: Tensor, keys: NoiseKeys) -> Tensor:
    """[B, K+1] int64, one draw at each position of [B, K+1, V]; drafts are drawn from another stream."""
    positions = range(target_logits.shape[1])
    draws = [
        sample(target_logits[:, at], keys=keys._replace(positions=keys.positions + at), stream=Stream.CORRECTION)
        for at in positions
    ]
    return torch.stack([one.token_ids for one in draws], dim=1)


def register(num_likeliest: int = NUM_LIKELIEST) -> None:
    """Make the rule available as `verifier="top_k"`, to `generate()` and to every saved generation config."""
    hf_speculate.register_verifier(
        "top_k",
        lambda config: TopKVerifier(num_likeliest, samples=config.typical_correction == "sample"),
        lossless=False,
        replace=True,
        reads_draft_logits=False,
    )


def generate(model, **kwargs):
    """What `model.generate(**kwargs)` returns, decoded with `assistant_model` and the top-k rule."""
    register()
    return hf_speculate.generate(model, fields_from=FIELDS, **kwargs)
