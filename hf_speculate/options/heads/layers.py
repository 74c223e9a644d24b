"""Decoder layers for draft heads of every config format.

Module names match the names of weights in checkpoints.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, Qwen3Config
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, rotate_half

from hf_speculate.errors import ConfigError
from hf_speculate.models.context import context_len
from hf_speculate.options.heads.row_cache import CacheView

# largest product of queries and heads per group that is folded; see `models.folded_attention`
_MOST_FOLDED_ROWS = 64


def read_layer_config(config: dict[str, Any], default_theta: float = 10000.0) -> Qwen3Config:
    """Build the config of a head's layers.

    Missing fields get the defaults of the trainers that write the format.
    """
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_layers, types = config.get("num_hidden_layers") or 1, list(config.get("layer_types") or ())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = {name: value for name, value in rope.items() if isinstance(value, dict)}
    # A head has one rotary embedding. If the config has one per layer type, use full attention's.
    rope = dict(nested.get("full_attention") or next(iter(nested.values()), None) or rope)
    for name, default in (("rope_theta", default_theta), ("partial_rotary_factor", 1.0)):
        rope.setdefault(name, config.get(name) or default)
    # old name for default frequencies with sections
    if "mrope" in (rope.get("type"), rope.get("rope_type")):
        rope = {name: value for name, value in rope.items() if name != "type"} | {
            "rope_type": "default"
        }
    sections, is_interleaved = (
        rope.pop("mrope_section", None),
        bool(rope.pop("mrope_interleaved", False)),
    )
    layers = Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
        hidden_act=config.get("hidden_act") or "silu",
        use_sliding_window=True,  # depends on the layer type
        sliding_window=config.get("sliding_window"),
        layer_types=(types + ["full_attention"] * num_layers)[:num_layers],
        max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
        rope_parameters=rope,
    )
    layers.rope_sections = sections and (sections, is_interleaved)
    return layers


def axes_of(sections: Sequence[int], is_interleaved: bool, num_frequencies: int) -> list[int]:
    """Return the axis of each rotary frequency: 0 for time, 1 for height, 2 for width.

    Raises:
        ConfigError: the sections do not split the frequencies into three parts.
    """
    if len(sections) != 3 or sum(sections) != num_frequencies:
        raise ConfigError(
            f"mrope_section must be three numbers whose sum is {num_frequencies}, half of the "
            "rotated width of a head, "
            f"got {list(sections)}; correct it in the config.json of the head"
        )
    if not is_interleaved:
        return [axis for axis, size in enumerate(sections) for _ in range(size)]
    return [index % 3 if index < 3 * sections[index % 3] else 0 for index in range(num_frequencies)]


def windows_of(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return, for each layer, the number of tokens a query attends to, including itself.

    An entry is None for full attention. Without `layer_types`, the result is empty.
    """
    window = getattr(config, "sliding_window", None) or None  # some configs use 0 for no window
    types = getattr(config, "layer_types", None) or ()
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


class Rotation(NamedTuple):
    """Cosines and sines of a rotary embedding."""

    cos: Tensor  # [B, 1, N, R], for the first R dimensions of each head
    sin: Tensor  # [B, 1, N, R]

    def turn(self, states: Tensor) -> Tensor:
        """Rotate the first R dimensions of states [B, heads, N, D]; leave the others unchanged."""
        width = self.cos.shape[-1]
        turned, unrotated = states[..., :width], states[..., width:]
        turned = turned * self.cos + rotate_half(turned) * self.sin
        return torch.cat([turned, unrotated], dim=-1) if unrotated.shape[-1] else turned


class Rotary:
    """The rotary embedding of a head.

    transformers computes it, including scaled variants. Its frequencies stay in float32.
    """

    def __init__(self, config: Qwen3Config, device: torch.device):
        with torch.device(device):
            # It reads only fields that all configs have.
            self._embedding = PhiRotaryEmbedding(config)  # type: ignore[arg-type]
        is_dynamic = (config.rope_parameters or {}).get("rope_type") == "dynamic"
        # Beyond the context, dynamic frequencies would also change for shorter rows.
        self._last_position = (context_len(config) or 0) - 1 if is_dynamic else None
        self._sections, self._device = getattr(config, "rope_sections", None), device

    @property
    def has_axes(self) -> bool:
        """Whether parts of each head rotate by time, height and width (M-RoPE).

        Raises:
            ConfigError: the sections do not fit the frequencies.
        """
        return self._axes is not None

    @cached_property
    def _axes(self) -> Tensor | None:
        """The axis of each rotated dimension, [R] int64; None if there is one axis."""
        if not self._sections:
            return None
        sections, is_interleaved = self._sections
        axes = axes_of(sections, is_interleaved, len(self._embedding.inv_freq))
        return torch.tensor([*axes, *axes], device=self._device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation at positions [B, N] int64.

        With three axes, positions are [3, B, N] in time, height and width.
        """
        if self._last_position is not None:
            positions = positions.clamp_max(self._last_position)
        example = torch.empty(0, dtype=dtype, device=positions.device)
        if positions.ndim == 2:
            cos, sin = self._embedding(example, positions)
            return Rotation(cos[:, None], sin[:, None])
        by_axis = self._embedding(example, positions.flatten(0, 1))  # each [3 * B, N, R]
        index = cast(Tensor, self._axes).expand(1, *positions.shape[1:], -1)  # [1, B, N, R]
        # each [1, B, N, R]
        cos, sin = (values.unflatten(0, (3, -1)).gather(0, index) for values in by_axis)
        return Rotation(cos.transpose(0, 1), sin.transpose(0, 1))


class Attention(nn.Module):
    """Grouped-query attention over a `RowCache`.

    With `has_norms`, the queries and keys of each head are normalised.
    """

    def __init__(self, config: Qwen3Config, has_norms: bool, in_width: int):
        super().__init__()
        self.head_dim, eps = config.head_dim, config.rms_norm_eps
        query_width, num_kv_heads = (
            config.num_attention_heads * self.head_dim,
            config.num_key_value_heads or 1,
        )
        self.q_proj = nn.Linear(in_width, query_width, bias=False)
        self.k_proj = nn.Linear(in_width, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(in_width, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps) if has_norms else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps) if has_norms else None

    def queries(self, states: Tensor, rotation: Rotation) -> Tensor:
        """Return queries [B, num_heads, N, D] for states [B, N, in_width]."""
        return self._turned(self.q_proj(states), self.q_norm, rotation)

    def keys_values(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, num_kv_heads, N, D] for states [B, N, in_width]."""
        values = self._heads(self.v_proj(states)).transpose(1, 2)
        return self._turned(self.k_proj(states), self.k_norm, rotation), values

    def forward(self, states: Tensor, rotation: Rotation, view: CacheView, layer: int) -> Tensor:
        """Cache the keys and values of states [B, N, in_width]; return outputs [B, N, H]."""
        keys, values = view.write(layer, *self.keys_values(states, rotation))
        attended = attend(self.queries(states, rotation), keys, values, view.mask(layer))
        return self.o_proj(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _turned(self, states: Tensor, norm: nn.RMSNorm | None, rotation: Rotation) -> Tensor:
        heads = self._heads(states)
        return rotation.turn((heads if norm is None else norm(heads)).transpose(1, 2))

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], -1, self.head_dim)  # [B, N, heads, D]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attend from queries [B, g * H, N, D] to keys and values [B, H, T, D].

    The mask [B, 1, N, T] is added to the scores. The result is [B, g * H, N, D].
    """
    groups, num_query = queries.shape[1] // keys.shape[1], queries.shape[2]
    if groups == 1 or num_query * groups > _MOST_FOLDED_ROWS:
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=groups > 1
        )
    folded = queries.unflatten(1, (-1, groups)).flatten(2, 3)  # [B, H, g * N, D]
    if mask is not None and num_query > 1:
        mask = mask.repeat(1, 1, groups, 1)  # [B, 1, g * N, T]
    output = scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return output.view(*output.shape[:2], groups, num_query, -1).flatten(1, 2)


class DecoderLayer(nn.Module):
    """A pre-norm layer of Llama or Qwen 3.

    Its attention may read other inputs besides the residual stream.
    """

    def __init__(self, config: Qwen3Config, has_norms: bool, in_width: int | None = None):
        super().__init__()
        self.self_attn = Attention(config, has_norms, in_width or config.hidden_size)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: Tensor, rotation: Rotation, view: CacheView, layer: int) -> Tensor:
        return self.finish(
            states, self.self_attn(self.input_layernorm(states), rotation, view, layer)
        )

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Add attention's output, then the MLP's, to the residual stream [B, N, H]."""
        residual = residual + attended
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output
