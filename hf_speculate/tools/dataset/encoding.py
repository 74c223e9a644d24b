"""Encodes rows of a data set as token ids, and groups them into batches of similar length."""

from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset.rows import Row

_CHUNK_LEN = 1024  # rows that a tokenizer encodes at once
# Errors of chat templates for messages that they do not support.
_TEMPLATE_ERRORS = (TemplateError, AttributeError, LookupError, TypeError, ValueError)


def token_ids_of(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, is_chat: bool) -> list[list[int]]:
    """Token ids of each row, without padding.

    Messages, and with `is_chat` also texts, pass through the chat template, which adds its own special tokens.
    """
    token_ids: list[list[int]] = [[] for _ in rows]
    for as_chat in (False, True):
        indices = [at for at, row in enumerate(rows) if (is_chat or not isinstance(row.content, str)) == as_chat]
        texts = [_chat_text(rows[at], tokenizer) if as_chat else str(rows[at].content) for at in indices]
        if not texts:
            continue
        encoded: Any = tokenizer(texts, add_special_tokens=not as_chat)
        for at, ids in zip(indices, encoded["input_ids"], strict=True):
            token_ids[at] = list(ids)
    for row, ids in zip(rows, token_ids, strict=True):
        if not ids:
            raise ConfigError(f"each prompt must have at least one token, got none at {row.source}; leave the row out")
    return token_ids


def padded(prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-pad B prompts; returns `input_ids` and `attention_mask`, both [B, T] int64."""
    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.int64, device="cpu")  # [B, T]
    attention_mask = torch.zeros_like(input_ids)
    for index, ids in enumerate(prompts):
        input_ids[index, width - len(ids) :] = torch.tensor(ids, device="cpu")
        attention_mask[index, width - len(ids) :] = 1
    return input_ids.to(device), attention_mask.to(device)


def batches_of(
    rows: Sequence[Row], batch_size: int, tokenizer: PreTrainedTokenizerBase, is_chat: bool
) -> list[list[Row]]:
    """Group rows of equal settings by length, longest first: a batch that does not fit into memory fails at once."""
    lens: list[int] = []
    for begin in range(0, len(rows), _CHUNK_LEN):
        lens += map(len, token_ids_of(rows[begin : begin + _CHUNK_LEN], tokenizer, is_chat))
    batches: list[list[Row]] = []
    filling: dict[str, list[Row]] = {}  # the batch with room, by settings
    for at in sorted(range(len(rows)), key=lambda at: -lens[at]):
        settings = {name: value for name, value in rows[at].settings.items() if name != "seed"}
        batch = filling.get(repr(settings))
        if batch is None or len(batch) == batch_size:
            batch = filling[repr(settings)] = []
            batches.append(batch)
        batch.append(rows[at])
    return batches


def check_chat_template(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Check that a tokenizer has a chat template."""
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
