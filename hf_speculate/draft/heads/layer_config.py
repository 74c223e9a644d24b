"""The decoder layers of a draft head, read from a config in any format."""

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

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
        max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
        rope=rope,
    )


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
