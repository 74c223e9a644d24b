"""Build untrained models with the shapes of the pair."""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training.pair.tokens import MAX_CONTEXT_LEN, VOCAB_SIZE

EOS_TOKEN_ID = 0
PAD_TOKEN_ID = 1
ROPE_THETA = 100_000.0


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama model with tied embeddings."""

    hidden_size: int
    num_layers: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


TARGET_SHAPE = Shape(hidden_size=192, num_layers=16, ffn_size=512, num_heads=6, num_kv_heads=2)
"""Deep and narrow: a CPU spends longer on dispatch than arithmetic, so shallow drafts are cheap."""

DRAFT_SHAPES = {
    "one-layer": Shape(hidden_size=192, num_layers=1, ffn_size=1024, num_heads=6, num_kv_heads=2),
    "two-layer": Shape(hidden_size=192, num_layers=2, ffn_size=768, num_heads=6, num_kv_heads=2),
}
"""Candidates; both have the target's width and start from its embeddings."""


def build_model(shape: Shape, seed: int) -> LlamaForCausalLM:
    """Build a float32 model with seeded weights.

    Args:
        shape: dimensions of the model.
        seed: seed of the global generator for the initial weights.

    Returns:
        The model in training mode.
    """
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        intermediate_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_CONTEXT_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=EOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        attn_implementation="sdpa",
        dtype="float32",
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).float().train()


@torch.no_grad()
def grow(model: LlamaForCausalLM, shape: Shape, seed: int) -> LlamaForCausalLM:
    """Return a deeper model that computes the same function.

    Each old layer is followed by copies of itself. The output projections of a copy are zero, so it
    adds nothing until it is trained.

    Args:
        model: the trained shallow model.
        shape: dimensions of the deeper model; `num_layers` is a multiple of that in the shallow
        model.
        seed: as for `build_model`.
    """
    deep = build_model(shape, seed)
    deep.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(model.model.norm.state_dict())
    repeats = shape.num_layers // len(model.model.layers)
    for index, layer in enumerate(deep.model.layers):
        layer.load_state_dict(model.model.layers[index // repeats].state_dict())
        if index % repeats:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return deep
