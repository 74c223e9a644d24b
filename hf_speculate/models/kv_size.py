"""Size of a KV cache, computed from a model's config."""

from typing import Any

from transformers import PreTrainedConfig


def kv_values_per_token(config: PreTrainedConfig) -> int:
    """Return the number of key and value entries per cached token in all layers; 0 if unknown."""
    num_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        return 0
    try:
        return num_layers * _values_of_layer(config)
    except RuntimeError:  # transformers raises it if layers differ, as in Gemma 4
        layers: Any = config.per_layer_config
        return sum(_values_of_layer(layers[index]) for index in range(num_layers))


def _values_of_layer(config: Any) -> int:
    num_heads = getattr(config, "num_attention_heads", None)
    if not isinstance(num_heads, int):
        return 0
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return 2 * int(num_kv_heads) * int(head_dim)
