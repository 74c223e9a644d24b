"""Build tiny Gemma 4 targets and assistants in code."""

import math
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from tests.support.tiny import INITIALIZER_RANGE, PAD_TOKEN_ID, make_config, make_model
from tests.support.tiny_configs import fill

GLOBAL_HEAD_DIM = 16  # for layers with full attention; the others have 8
NUM_CENTROIDS, NUM_BEST = 8, 3
LAYER_SCALAR = 0.7


def make_target(num_shared: int = 2, **fields: Any) -> PreTrainedModel:
    """Make a Gemma 4 with four layers; the last `num_shared` read the states of earlier ones."""
    return make_model(
        "gemma4", num_kv_shared_layers=num_shared, global_head_dim=GLOBAL_HEAD_DIM, **fields
    )


def make_unified_target() -> PreTrainedModel:
    """Make a target of the same family as the 12B model."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return _built(
        fill(transformers.Gemma4UnifiedTextConfig, global_head_dim=GLOBAL_HEAD_DIM, **layers),
        seed=0,
    )


def make_reader() -> PreTrainedModel:
    """Make a target of the class of the published checkpoints, without its image encoder."""
    text = make_config("gemma4", num_kv_shared_layers=2, global_head_dim=GLOBAL_HEAD_DIM)
    return _built(
        transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None), seed=0
    )


def make_assistant(
    target: PreTrainedModel,
    *,
    is_ordered: bool = False,
    seed: int = 1,
    scale: float = 1.0,
    **fields: Any,
) -> PreTrainedModel:
    """Make a random three-layer assistant for a target; `fields` are the fields of its layers.

    `scale` multiplies its logits: at 0, all tokens are equally likely to be proposed.
    """
    text = target.config.get_text_config()
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "layer_types": layer_types,
        "num_kv_shared_layers": 3,
    }
    fields = {"vocab_size": text.vocab_size, "global_head_dim": GLOBAL_HEAD_DIM, **sizes, **fields}
    is_unified = text.model_type == "gemma4_unified_text"
    if not is_unified:
        fields |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    name = "Gemma4Unified" if is_unified else "Gemma4"
    model = _built(
        getattr(transformers, f"{name}AssistantConfig")(
            text_config=fill(getattr(transformers, f"{name}TextConfig"), **fields),
            backbone_hidden_size=text.hidden_size,
            use_ordered_embeddings=is_ordered,
            num_centroids=NUM_CENTROIDS,
            centroid_intermediate_top_k=NUM_BEST,
        ),
        seed,
    )
    for layer in model.model.layers:
        layer.layer_scalar.fill_(LAYER_SCALAR)
    if is_ordered:
        generator = torch.Generator().manual_seed(seed)
        model.masked_embedding.token_ordering.copy_(
            torch.randperm(text.vocab_size, generator=generator)
        )
    model.lm_head.weight.mul_(scale)
    return model.to(target.dtype)


def _built(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Make a model in float64 with random matrices and vectors."""
    model = (
        AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval().requires_grad_(False)
    )
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        mean, deviation = (0.0, INITIALIZER_RANGE) if weight.ndim > 1 else (1.0, 0.1)
        weight.copy_(
            torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * deviation + mean
        )
    model.generation_config = GenerationConfig(pad_token_id=PAD_TOKEN_ID, do_sample=False)
    return model


def num_scored(vocab_size: int) -> int:
    """Return the number of tokens that ordered embeddings score in each row."""
    return NUM_BEST * math.ceil(vocab_size / NUM_CENTROIDS)
