"""Encodes rows of a data set as token ids, and groups them into batches of similar length."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset.rows import Row

# Errors of chat templates, also of missing ones, for messages that they do not support.
_TEMPLATE_ERRORS = (TemplateError, AttributeError, LookupError, TypeError, ValueError)


def token_ids_of(row: Row, tokenizer: PreTrainedTokenizerBase, is_chat: bool) -> list[int]:
    """Token ids of a row.

    Messages, and with `is_chat` also texts, pass through the chat template, which adds its own special tokens.
    """
    encoded: Any
    if isinstance(row.content, str) and not is_chat:
        encoded = tokenizer(row.content)
    else:
        messages = [{"role": "user", "content": row.content}] if isinstance(row.content, str) else row.content
        try:
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except _TEMPLATE_ERRORS as error:
            raise ConfigError(
                "the tokenizer must have a chat template that fits the messages, got "
                f"{type(error).__name__} ({error}) at {row.source}; check their roles, or give prompts as plain text"
            ) from error
    if not encoded["input_ids"]:
        raise ConfigError(f"each prompt must have at least one token, got none at {row.source}; leave the row out")
    return list(encoded["input_ids"])


def batches_of(
    rows: Sequence[Row], batch_size: int, tokenizer: PreTrainedTokenizerBase, is_chat: bool
) -> list[list[Row]]:
    """Group rows of equal settings by length, longest first: a batch that does not fit into memory fails at once."""
    batches: list[list[Row]] = []
    filling: dict[str, list[Row]] = {}  # the batch with room, by settings
    for row in sorted(rows, key=lambda row: -len(token_ids_of(row, tokenizer, is_chat))):
        batch = filling.get(repr(row.settings))
        if batch is None or len(batch) == batch_size:
            batch = filling[repr(row.settings)] = []
            batches.append(batch)
        batch.append(row)
    return batches
