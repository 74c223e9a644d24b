"""Speculative decoding with a top-k verifier, as a `custom_generate` function."""

from dataclasses import dataclass

import torch
from torch import Tensor

try:
    import hf_speculate
    from hf_speculate.kernels import sample
    from hf_speculate.types import DraftOut, NoiseKeys, Stream, Verdict
except ImportError as error:
    raise ImportError(
        "hf_speculate is not installed; run pip install . in a clone of its repository"
    ) from error

NUM_LIKELIEST = 4
# transformers copies this file alone, so it repeats the fields of ../generation_config.json.
FIELDS = {
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "constant",
    "verifier": "top_k",
}


@dataclass(frozen=True)
class TopKVerifier:
    """Verifier that accepts the likeliest tokens.

    It accepts a drafted token among the `num_likeliest` most likely tokens of the target, including
    ties.
    """

    num_likeliest: int
    samples: bool  # whether to sample the token after the accepted ones

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        vocab_size = target_logits.shape[-1]
        # [B, K]; gather needs valid ids, and a drafted id may be invalid
        ids = draft.token_ids.clamp(0, vocab_size - 1)
        chosen = target_logits[:, :-1].gather(-1, ids[..., None])[..., 0]  # [B, K]
        # [B, K]
        bounds = target_logits[:, :-1].topk(min(self.num_likeliest, vocab_size)).values[..., -1]
        # [B, K+1]
        following = draw(target_logits, keys) if self.samples else target_logits.argmax(-1)
        return hf_speculate.keep_prefix(target_logits, draft, chosen >= bounds, following)


def draw(target_logits: Tensor, keys: NoiseKeys) -> Tensor:
    """Sample one token at each position of [B, K+1, V] and return [B, K+1] int64.

    Drafts use a different random stream.
    """
    positions = range(target_logits.shape[1])
    draws = [
        sample(
            target_logits[:, position],
            keys=keys._replace(positions=keys.positions + position),
            stream=Stream.CORRECTION,
        )
        for position in positions
    ]
    return torch.stack([result.token_ids for result in draws], dim=1)


def register(num_likeliest: int = NUM_LIKELIEST) -> None:
    """Register the verifier as "top_k", for `generate()` and for saved generation configs."""
    hf_speculate.register_verifier(
        "top_k",
        lambda config: TopKVerifier(num_likeliest, samples=config.typical_correction == "sample"),
        lossless=False,
        replace=True,
        reads_draft_logits=False,
    )


def generate(model, **kwargs):
    """Run `model.generate(**kwargs)` with `assistant_model` and the top-k verifier."""
    register()
    return hf_speculate.generate(model, fields_from=FIELDS, **kwargs)
