"""Rotary embeddings that change with the length of the text."""

from typing import Any

from transformers import PreTrainedModel

_GROWING_TYPES = ("dynamic", "longrope")


def growing_rope(model: PreTrainedModel) -> tuple[str, int] | None:
    """The kind of rotary embedding that changes past a border, with that border in tokens; None for all others.

    Past the border the frequencies change for tokens whose states are cached already, and the model is given new
    buffers by its own forward.
    """
    config = model.config.get_text_config(decoder=True)
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for rope in by_layer_type:
        if rope.get("rope_type") in _GROWING_TYPES:
            return rope["rope_type"], rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return None
