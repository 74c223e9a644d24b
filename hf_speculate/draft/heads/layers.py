"""Decoder layers of draft heads, read from a config in any format, for tokens that stand at the end of their rows.

Module names are those of the checkpoints, so a head's state dict is its file. Keys and values go into a `RowCache`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_speculate.draft.heads.row_cache import Placed, StateStore

_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and options of a head's decoder layers."""

    hidden_size: int  # H, the head's own width
    intermediate_size: int  # I of the MLP
    num_layers: int  # decoder layers of the head
    num_heads: int  # query heads
    num_kv_heads: int  # key-value heads
    head_dim: int  # width of a head
    rms_norm_eps: float  # epsilon of every norm
    hidden_act: str  # name of the MLP's activation
    # by layer, how many tokens a query attends to, itself included; None if it attends to all
    windows: tuple[int | None, ...]
    rotary_dim: int  # leading numbers of a head that are rotated
    max_position_embeddings: int  # length that the head was trained for
    rope: dict[str, Any]  # `rope_theta`, `rope_scaling` or `rope_parameters`, as the config has them

    def rope_config(self) -> LlamaConfig:
        """A config from which transformers builds the rotary embedding, scaled variants included."""
        return LlamaConfig(
            hidden_size=self.rotary_dim,
            num_attention_heads=1,
            head_dim=self.rotary_dim,
            max_position_embeddings=self.max_position_embeddings,
            **self.rope,
        )


def read_layer_config(config: dict[str, Any], default_theta: float = 10000.0) -> LayerConfig:
    """The layers that a config describes; missing fields mean what they mean to the trainers of the format."""
    hidden_size, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    num_layers = int(config.get("num_hidden_layers") or 1)
    rope, factor = _rope_of(config, default_theta)
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        hidden_act=str(config.get("hidden_act") or "silu"),
        windows=_windows_of(config, num_layers),
        rotary_dim=int(head_dim * factor),
        max_position_embeddings=max_length_of(config),
        rope=rope,
    )


def max_length_of(config: dict[str, Any]) -> int:
    """The length that a head was trained for."""
    return int(config.get("max_position_embeddings") or 2048)


def _windows_of(config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """By layer: what its type says; without types, no layer has a window."""
    types = list(config.get("layer_types") or ())[:num_layers]
    types += ["full_attention"] * (num_layers - len(types))
    window = config.get("sliding_window")
    return tuple(int(window) if kind == "sliding_attention" and window else None for kind in types)


def _rope_of(config: dict[str, Any], default_theta: float) -> tuple[dict[str, Any], float]:
    """The rotary fields without the share of a head that is rotated, and that share."""
    rope = {name: config[name] for name in _ROPE_FIELDS if config.get(name) is not None}
    factor = config.get("partial_rotary_factor")
    for name in ("rope_parameters", "rope_scaling"):
        if name in rope:
            rope[name] = dict(_flat(rope[name]))
            factor = rope[name].pop("partial_rotary_factor", factor)
    if "rope_parameters" in rope and "rope_theta" not in rope["rope_parameters"]:
        rope["rope_parameters"]["rope_theta"] = rope.pop("rope_theta", default_theta)
    elif "rope_parameters" not in rope:
        rope.setdefault("rope_theta", default_theta)
    if "rope_parameters" in rope:
        rope = {"rope_parameters": rope["rope_parameters"]}
    return rope, float(factor or 1.0)


def _flat(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters of full attention if they are given by type of layer; a head has one rotary embedding."""
    nested = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    return nested.get("full_attention") or next(iter(nested.values()), None) or parameters


# The heads of a group are folded into query rows up to this many rows; see `models.folded_attention`.
_MOST_FOLDED_ROWS = 64


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 or wider."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        return rms_norm(states, (states.shape[-1],), self.weight, self.eps)


class MLP(nn.Module):
    """The gated MLP of Llama and Qwen 3."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.act(self.gate_proj(states)) * self.up_proj(states))
        return output


class Rotation(NamedTuple):
    """Cosines and sines of a rotary embedding."""

    cos: Tensor  # [B, 1, N, R], R leading numbers of a head
    sin: Tensor  # [B, 1, N, R]

    def turn(self, states: Tensor) -> Tensor:
        """Rotate the first R numbers of [B, heads, N, D] and leave the others."""
        width = self.cos.shape[-1]
        turned, rest = states[..., :width], states[..., width:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * self.cos + torch.cat([-second, first], dim=-1) * self.sin
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


class Rotary:
    """The rotary embedding of a head, from transformers, scaled variants included; its frequencies stay in float32."""

    def __init__(self, config: LayerConfig, device: torch.device):
        self._embedding = LlamaRotaryEmbedding(config.rope_config()).to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation of tokens at positions [B, N] int64."""
        example = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = self._embedding(example, positions)
        return Rotation(cos[:, None], sin[:, None])


class Attention(nn.Module):
    """Grouped-query attention over a `RowCache`; with `has_norms`, queries and keys are normalised head by head."""

    def __init__(self, config: LayerConfig, in_width: int, has_norms: bool):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(in_width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(in_width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(in_width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if has_norms else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if has_norms else None

    def queries(self, states: Tensor, rotation: Rotation) -> Tensor:
        """[B, num_heads, N, D] of states [B, N, in_width]."""
        queries = self._heads(self.q_proj(states))
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        return rotation.turn(queries.transpose(1, 2))

    def keys_values(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values [B, num_kv_heads, N, D] of states [B, N, in_width]."""
        keys, values = self._heads(self.k_proj(states)), self._heads(self.v_proj(states))
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        return rotation.turn(keys.transpose(1, 2)), values.transpose(1, 2)

    def forward(self, states: Tensor, rotation: Rotation, cache: StateStore, layer: int, placed: Placed) -> Tensor:
        """[B, N, H]; the keys and values of the states [B, N, in_width] go into the cache."""
        keys, values = cache.write(layer, *self.keys_values(states, rotation), placed)
        attended = attend(self.queries(states, rotation), keys, values, placed.mask(layer))
        return self.o_proj(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], -1, self.head_dim)  # [B, N, heads, D]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of grouped queries, without copies of keys and values for short queries.

    Queries and outputs are [B, g * num_kv_heads, N, D], keys and values [B, num_kv_heads, T, D]. The mask is [B, 1, N,
    T] additive.
    """
    groups, num_query = queries.shape[1] // keys.shape[1], queries.shape[2]
    if groups == 1 or num_query * groups > _MOST_FOLDED_ROWS:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=groups > 1)
    folded = queries.unflatten(1, (-1, groups)).flatten(2, 3)  # [B, num_kv_heads, g * N, D]
    if mask is not None and num_query > 1:
        mask = mask.repeat(1, 1, groups, 1)  # [B, 1, g * N, T]
    output = scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    output = output.view(*output.shape[:2], groups, num_query, -1)
    return output.flatten(1, 2)


class DecoderLayer(nn.Module):
    """An ordinary pre-norm layer of Llama or Qwen 3, whose attention may read more than its residual stream."""

    def __init__(self, config: LayerConfig, has_norms: bool, in_width: int | None = None):
        super().__init__()
        self.self_attn = Attention(config, in_width or config.hidden_size, has_norms)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: Tensor, rotation: Rotation, cache: StateStore, layer: int, placed: Placed) -> Tensor:
        """[B, N, H] of states [B, N, H]."""
        states = states + self.self_attn(self.input_layernorm(states), rotation, cache, layer, placed)
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output
