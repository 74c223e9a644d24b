"""Context of a model: how many tokens of a row it can read, by its tables of positions or by its training."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from hf_speculate.models.language_model import counts_columns
from hf_speculate.models.quirks import Limit, growing_rope, limit_reason

_LENGTHS = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings", "max_seq_len")
_SCALED_TYPES = (
    "linear",
    "yarn",
)  # types of rotary embeddings that read `factor` times the trained length


class Context(NamedTuple):
    """The context of a model: how many tokens of a row it can read."""

    num_tokens: int
    counts_padding: bool = False  # whether padding takes positions
    shares_columns: bool = False  # whether the columns of the longest row in a forward count for all of its rows


def context_of(model: PreTrainedModel, longest: int = 0) -> Context | None:
    """The context of a model, for rows that begin with `longest` tokens at most; None if its config names no bound.

    A rotary embedding raises no error past the length that its model was trained for, but next to none of the tokens
    drafted there would be accepted. Some types change the positions of all rows once one of them is longer.
    """
    length = context_len(model.config)
    if length is None:
        return None
    rope = growing_rope(model)
    if rope is not None and longest <= rope[1]:  # longer prompts are read with the same frequencies to the end
        length = min(length, rope[1])
    return Context(length, counts_columns(model), bool(limit_reason(model, Limit.CONTEXT_BY_COLUMNS)))


def context_len(config: PreTrainedConfig) -> int | None:
    """The tokens of a row that the text decoder of a config can read; None if there is no bound."""
    text: Any = config.get_text_config(decoder=True)
    values = (getattr(text, name, None) for name in _LENGTHS)
    length = next((int(value) for value in values if isinstance(value, int) and value > 0), None)
    if length is None or getattr(text, "alibi", False):
        return None
    return min(_scaled(length, rope) for rope in _ropes(text))


def max_columns(model: PreTrainedModel) -> int | None:
    """Columns of the KV cache, padding included, for which a target has a table; None if it does not count columns."""
    is_pair = model.config.get_text_config(decoder=True).is_encoder_decoder
    grows = limit_reason(model, Limit.PADDING_HAS_NO_POSITION)  # its table of positions does
    has_positions = is_pair and counts_columns(model) and not grows
    if not has_positions and not limit_reason(model, Limit.CONTEXT_BY_COLUMNS):
        return None
    return context_len(model.config)


def encoder_context_len(config: PreTrainedConfig) -> int | None:
    """The tokens of a row that the text encoder of a config can read; None if there is no bound."""
    values = (getattr(config, name, None) for name in ("max_encoder_position_embeddings", "max_position_embeddings"))
    return next((int(value) for value in values if isinstance(value, int) and value > 0), None)


def _ropes(text: Any) -> Iterator[dict[str, Any]]:
    """The parameters of a decoder's rotary embeddings, by type of layer if these differ; empty ones if it has none."""
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    yield from [value for value in parameters.values() if isinstance(value, dict)] or [parameters]


def _scaled(length: int, rope: dict[str, Any]) -> int:
    rope_type, trained = rope.get("rope_type"), rope.get("original_max_position_embeddings") or length
    if rope_type == "dynamic":  # whose frequencies change with every longer text, those of cached keys do not
        return min(length, trained)
    return max(length, int(trained * (rope.get("factor") or 1))) if rope_type in _SCALED_TYPES else length
