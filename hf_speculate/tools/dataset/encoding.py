"""Encodes rows of a data set as token ids, and groups them into batches of similar length."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset.rows import Row

# Errors of chat templates for messages that they do not support.
_TEMPLATE_ERRORS = (TemplateError, AttributeError, LookupError, TypeError, ValueError)


def token_ids_of(row: Row, tokenizer: PreTrainedTokenizerBase, is_chat: bool) -> list[int]:
    """Token ids of a row.

    Messages, and with `is_chat` also texts, pass through the chat template, which adds its own special tokens.
    """
    as_chat = is_chat or not isinstance(row.content, str)
    encoded: Any = tokenizer(_chat_text(row, tokenizer) if as_chat else row.content, add_special_tokens=not as_chat)
    if not encoded["input_ids"]:
        raise ConfigError(f"each prompt must have at least one token, got none at {row.source}; leave the row out")
    return list(encoded["input_ids"])


def batches_of(
    rows: Sequence[Row], batch_size: int, tokenizer: PreTrainedTokenizerBase, is_chat: bool
) -> list[list[Row]]:
    """Group rows of equal settings by length, longest first: a batch that does not fit into memory fails at once."""
    lens = [len(token_ids_of(row, tokenizer, is_chat)) for row in rows]
    batches: list[list[Row]] = []
    filling: dict[str, list[Row]] = {}  # the batch with room, by settings
    for at in sorted(range(len(rows)), key=lambda at: -lens[at]):
        batch = filling.get(repr(rows[at].settings))
        if batch is None or len(batch) == batch_size:
            batch = filling[repr(rows[at].settings)] = []
            batches.append(batch)
        batch.append(rows[at])
    return batches


def check_chat_template(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    if tokenizer.chat_template is None:
        raise ConfigError(f"the tokenizer must have a chat template for {source}, got none; give prompts as plain text")


def _chat_text(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    messages = [{"role": "user", "content": row.content}] if isinstance(row.content, str) else row.content
    check_chat_template(tokenizer, row.source)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except _TEMPLATE_ERRORS as error:
        raise ConfigError(
            f"messages must fit the tokenizer's chat template, got {type(error).__name__} ({error}) at {row.source}; "
            "check their roles and contents"
        ) from error
