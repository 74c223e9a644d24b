"""EAGLE head: one transformer layer that reads the target's hidden states and drafts tokens.

A pair is a token with the state of the token before it. `fc` combines the embedding of the token
with the state. The output of the layer predicts the target's next last hidden state and, through
the target's output matrix, the token after the pair. For a true pair, the state is the target's
last hidden state, corrected by a projection of two earlier layers, as in EAGLE-3. For a drafted
pair, the state is the output of the head. The output matrix is cut to the most frequent tokens, as
in FR-Spec; this matrix and the embeddings belong to the target and are not stored.

Source: Li et al., "EAGLE" (arXiv:2401.15077), section 4; "EAGLE-3" (arXiv:2503.01840), section 3;
Zhao et al., "FR-Spec" (arXiv:2502.14856), section 3.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

EMBEDDING_SCALE = 8.0  # scales the target's embeddings to the magnitude of its states
CONFIG, WEIGHTS = "config.json", "model.safetensors"
LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
)


class Heads(NamedTuple):
    """Queries, keys and values for pairs, after RoPE."""

    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, Hkv, N, D]
    value: Tensor  # [B, Hkv, N, D]


class Attention(nn.Module):
    """Projections for the attention of the layer.

    The caller chooses the keys and values.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        width = config.hidden_size
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Heads:
        """Project [B, N, D]."""
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return Heads(*apply_rotary_pos_emb(query, key, *turns), value)


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = FeedForward(config)


class DraftHead(nn.Module):
    """Weights of the head and parts of its forward.

    States are divided by the weight of the target's last norm, and the output matrix is multiplied
    by this weight, so the head works on values of similar magnitude.

    Args:
        config: config of the layer.
        aux_layers: A layers of the target, whose inputs correct the last hidden state.
        target_ids: [Vd] int64, the tokens in the draft vocabulary.
        target: model that shares its embeddings and output matrix with the head.
    """

    def __init__(
        self,
        config: LlamaConfig,
        aux_layers: list[int],
        target_ids: Tensor,
        target: PreTrainedModel,
    ):
        super().__init__()
        self.config, self.aux_layers = config, aux_layers
        self.hidden_layers = [*aux_layers, -1]
        self.embeddings = target.get_input_embeddings().weight.detach()  # [V, D]
        # [D], weight of the target's last norm
        self.scale = target.get_decoder().norm.weight.detach()
        width = config.hidden_size
        self.aux_norm = nn.ModuleList(nn.RMSNorm(width, config.rms_norm_eps) for _ in aux_layers)
        self.aux_proj = nn.Linear(len(aux_layers) * width, width, bias=False)
        self.fc = nn.Linear(2 * width, width)
        self.layer = Layer(config)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("target_ids", target_ids)  # [Vd]
        output = target.get_output_embeddings().weight.detach()[
            target_ids.to(self.embeddings.device)
        ]
        self.register_buffer("output", output * self.scale, persistent=False)  # [Vd, D]
        self.to(self.embeddings.device)

    def project(self, hidden: Tensor) -> Tensor:
        """Project target states [B, N, (A + 1) * D] to states [B, N, D] of true pairs."""
        *aux, last = hidden.chunk(len(self.hidden_layers), dim=-1)
        last = last / self.scale
        return last + self.aux_proj(
            torch.cat([norm(x) for norm, x in zip(self.aux_norm, aux, strict=True)], dim=-1)
        )

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, N, D] for positions [B, N] int64."""
        return self.rotary(self.embeddings, positions)

    def attend_from(
        self, token_ids: Tensor, states: Tensor, turns: tuple[Tensor, Tensor]
    ) -> tuple[Heads, Tensor]:
        """Return queries, keys and values for pairs, and the residual [B, N, D].

        Args:
            token_ids: [B, N] int64, ids in the target vocabulary.
            states: [B, N, D], from `project` or from an earlier output of the head.
            turns: cosines and sines for the positions of the pairs.
        """
        embedded = self.embeddings[token_ids] * EMBEDDING_SCALE
        residual = self.fc(torch.cat([embedded, states.to(embedded.dtype)], dim=-1))
        return self.layer.self_attn(self.layer.input_layernorm(residual), turns), residual

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Return the output of the head [B, N, D], given the attention output [B, H, N, D]."""
        x = residual + self.layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x))

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [..., Vd] over the draft vocabulary."""
        return nn.functional.linear(states, self.output)

    def save(self, folder: Path, target_name: str) -> None:
        """Save the config, and the weights in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        layer = {key: getattr(self.config, key) for key in LAYER_FIELDS}
        config = {"target": target_name, "aux_layers": self.aux_layers, "layer": layer}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights = {
            name: tensor.detach().to(torch.bfloat16).contiguous()
            for name, tensor in self.named_parameters()
        }
        save_file(weights | {"target_ids": self.target_ids.int()}, folder / WEIGHTS)

    @classmethod
    def load(cls, folder: Path, target: PreTrainedModel) -> "DraftHead":
        """Load the head from `folder`, in the target's dtype and on its device."""
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
        weights["target_ids"] = weights["target_ids"].long()
        head = cls(
            LlamaConfig(**config["layer"]), config["aux_layers"], weights["target_ids"], target
        )
        head.load_state_dict(weights)
        return head.to(head.embeddings.dtype).requires_grad_(False).eval()
