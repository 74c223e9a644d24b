"""Compute the drafts of a Gemma 4 assistant for one row in float64, without masks or a cache."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu
from transformers import PreTrainedModel

from tests.support.tiny import SLIDING_WINDOW

THETA = {"sliding_attention": 1e4, "full_attention": 1e6}
ROTATED = {"sliding_attention": 1.0, "full_attention": 0.25}  # fraction of a head that is rotated


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(heads: Tensor, position: int, layer_type: str) -> Tensor:
    """Rotate heads [N, D] for a position: the first pairs of dimensions i and i + D/2 turn."""
    half = heads.shape[1] // 2
    turning = int(ROTATED[layer_type] * heads.shape[1]) // 2
    angles = torch.zeros(half, dtype=torch.float64)
    for index in range(turning):
        angles[index] = position * THETA[layer_type] ** (-2 * index / heads.shape[1])
    first, second = heads[:, :half], heads[:, half:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        1,
    )


class Reference:
    """Reference that computes drafts from the text alone.

    The target has read all tokens except the newest.
    """

    def __init__(
        self,
        assistant: Any,
        target: PreTrainedModel,
        position: int = -1,
        window: int = SLIDING_WINDOW,
    ):
        self.assistant, self.target, self.position, self.window = (
            assistant,
            target,
            position,
            window,
        )
        self.config = assistant.config.get_text_config()

    @torch.no_grad()
    def logits(self, text: Sequence[int], drafted: Sequence[int], num: int) -> Tensor:
        """Return logits [K, V] for the first `num` drafts, which follow the tokens in `drafted`."""
        assistant, table = self.assistant, self.target.get_input_embeddings().weight
        read, newest = list(text[:-1]), text[-1]
        output = self.target(
            torch.tensor([read]), output_hidden_states=True, return_shared_kv_states=True
        )
        state, rows = output.hidden_states[-1][0, -1], []
        for token_id in [newest, *drafted][:num]:
            embedding = table[token_id] * math.sqrt(table.shape[1])
            states = assistant.pre_projection.weight @ torch.cat([embedding, state])
            for layer, layer_type in zip(
                assistant.model.layers, self.config.layer_types, strict=True
            ):
                # [H, n, D]
                keys, values = (part[0] for part in output.shared_kv_states[layer_type])
                states = self.layer(
                    layer, states, keys, values, len(read) + self.position, layer_type
                )
            normed = norm(states, assistant.model.norm.weight, self.config.rms_norm_eps)
            rows.append(self.scores(normed))
            state = assistant.post_projection.weight @ normed
        return torch.stack(rows)

    def layer(
        self,
        layer: Any,
        states: Tensor,
        keys: Tensor,
        values: Tensor,
        position: int,
        layer_type: str,
    ) -> Tensor:
        attention, eps = layer.self_attn, self.config.rms_norm_eps
        query = attention.q_proj.weight @ norm(states, layer.input_layernorm.weight, eps)
        query = norm(query.view(self.config.num_attention_heads, -1), attention.q_norm.weight, eps)
        query, attended = rotate(query, position, layer_type), []
        first = max(keys.shape[1] - self.window, 0) if layer_type == "sliding_attention" else 0
        for number, head in enumerate(query):
            group = number * keys.shape[0] // len(query)
            weights = (keys[group, first:] @ head).softmax(0)
            attended.append(weights @ values[group, first:])
        output = attention.o_proj.weight @ torch.cat(attended)
        states = states + norm(output, layer.post_attention_layernorm.weight, eps)
        inner = norm(states, layer.pre_feedforward_layernorm.weight, eps)
        gate = gelu(layer.mlp.gate_proj.weight @ inner, approximate="tanh")
        output = layer.mlp.down_proj.weight @ (gate * (layer.mlp.up_proj.weight @ inner))
        return (
            states + norm(output, layer.post_feedforward_layernorm.weight, eps)
        ) * layer.layer_scalar

    def scores(self, normed: Tensor) -> Tensor:
        """Return the scores [V] for a state [H]."""
        head, embedder = self.assistant.lm_head.weight, self.assistant.masked_embedding
        if embedder is None:
            cap = self.config.final_logit_softcapping or math.inf
            return head @ normed if cap == math.inf else cap * torch.tanh(head @ normed / cap)
        scores = torch.full((len(head),), -torch.inf, dtype=normed.dtype)
        size = len(head) // embedder.num_centroids
        products = (embedder.centroids.weight @ normed).tolist()
        for centroid in sorted(range(len(products)), key=products.__getitem__)[
            -embedder.centroid_intermediate_top_k :
        ]:
            for token_id in embedder.token_ordering[
                centroid * size : (centroid + 1) * size
            ].tolist():
                scores[token_id] = head[token_id] @ normed
        return scores
