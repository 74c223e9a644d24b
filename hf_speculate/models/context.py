"""Context length of a model, limited by its position table or its training."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from hf_speculate.models.language_model import counts_columns
from hf_speculate.models.quirks import Limit, growing_rope, limit_reason

_LENGTHS = (
    "max_target_positions",
    "max_decoder_position_embeddings",
    "max_position_embeddings",
    "max_seq_len",
)
_SCALED_TYPES = ("linear", "yarn")  # rotary embeddings that support `factor` times the length


class Context(NamedTuple):
    """The context length of a model."""

    num_tokens: int
    counts_padding: bool = False  # whether padding takes up positions
    shares_columns: bool = False  # whether the longest row of a forward determines all rows


def context_of(model: PreTrainedModel, longest: int = 0) -> Context | None:
    """Return the context length of a model.

    A rotary embedding raises no error past the trained length, but almost no token drafted there
    would be accepted. Some types change the positions of all rows as soon as one row exceeds the
    length.

    Args:
        model: The model.
        longest: Number of tokens in the longest prompt.

    Returns:
        The context; None if the config sets no limit.
    """
    length = context_len(model.config)
    if length is None:
        return None
    rope = growing_rope(model)
    # A longer prompt keeps its frequencies to the end of the call.
    if rope is not None and longest <= rope[1]:
        length = min(length, rope[1])
    return Context(
        length, counts_columns(model), bool(limit_reason(model, Limit.CONTEXT_BY_COLUMNS))
    )


def context_len(config: PreTrainedConfig) -> int | None:
    """Return the context length of a config's text decoder in tokens; None if there is no limit."""
    text: Any = config.get_text_config(decoder=True)
    values = (getattr(text, name, None) for name in _LENGTHS)
    length = next((int(value) for value in values if isinstance(value, int) and value > 0), None)
    if length is None or getattr(text, "alibi", False):
        return None
    return min(_scaled(length, rope) for rope in _ropes(text))


def max_columns(model: PreTrainedModel) -> int | None:
    """Return the number of KV cache columns, including padding, that a position table covers.

    The result is None if the model does not position tokens by column.
    """
    is_pair = model.config.get_text_config(decoder=True).is_encoder_decoder
    table_grows = limit_reason(model, Limit.PADDING_HAS_NO_POSITION)
    has_positions = is_pair and counts_columns(model) and not table_grows
    if not has_positions and not limit_reason(model, Limit.CONTEXT_BY_COLUMNS):
        return None
    return context_len(model.config)


def encoder_context_len(config: PreTrainedConfig) -> int | None:
    """Return the context length of a config's text encoder in tokens; None if there is no limit."""
    values = (
        getattr(config, name, None)
        for name in ("max_encoder_position_embeddings", "max_position_embeddings")
    )
    return next((int(value) for value in values if isinstance(value, int) and value > 0), None)


def _ropes(text: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of the rotary embeddings, one dict per layer type; empty without any."""
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    yield from [value for value in parameters.values() if isinstance(value, dict)] or [parameters]


def _scaled(length: int, rope: dict[str, Any]) -> int:
    rope_type, trained = (
        rope.get("rope_type"),
        rope.get("original_max_position_embeddings") or length,
    )
    # Its frequencies change with the length, but cached keys keep the old frequencies.
    if rope_type == "dynamic":
        return min(length, trained)
    return (
        max(length, int(trained * (rope.get("factor") or 1)))
        if rope_type in _SCALED_TYPES
        else length
    )
