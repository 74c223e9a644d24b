"""Turns the rows of a data set into token ids, and into batches of rows of like length."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset.rows import Row

_CHUNK_LEN = 1024  # rows that a tokenizer is given at once
# What templates do with messages that they were not written for.
_TEMPLATE_ERRORS = (TemplateError, AttributeError, LookupError, TypeError, ValueError)


def token_ids_of(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, is_chat: bool) -> list[list[int]]:
    """What the model reads of every row, without padding.

    Messages, and with `is_chat` texts too, go through the tokenizer's chat template, which says itself what begins a
    text: no special tokens are added to it.

    Raises:
        ConfigError: a row is empty, or does not fit the chat template.
    """
    token_ids: list[list[int]] = [[] for _ in rows]
    for as_chat in (False, True):
        places = [place for place, row in enumerate(rows) if (is_chat or not isinstance(row.content, str)) == as_chat]
        texts = [_chat_text(rows[place], tokenizer) if as_chat else str(rows[place].content) for place in places]
        if not texts:
            continue
        encoded: Any = tokenizer(texts, add_special_tokens=not as_chat)
        for place, ids in zip(places, encoded["input_ids"], strict=True):
            token_ids[place] = list(ids)
    for row, ids in zip(rows, token_ids, strict=True):
        if not ids:
            raise ConfigError(f"each prompt must have a token at least, got none at {row.place}; leave the row out")
    return token_ids


def padded(prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts in one batch, padded on the left as decoding needs it.

    Args:
        prompts: [B] token ids, one or more of each.
        pad_token_id: what fills shorter ones up.
        device: of the result.

    Returns:
        `input_ids` [B, T] int64 and `attention_mask` [B, T] int64.
    """
    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.int64, device="cpu")  # [B, T]
    attention_mask = torch.zeros_like(input_ids)
    for index, ids in enumerate(prompts):
        input_ids[index, width - len(ids) :] = torch.tensor(ids, device="cpu")
        attention_mask[index, width - len(ids) :] = 1
    return input_ids.to(device), attention_mask.to(device)


def batches_of(
    rows: Sequence[Row],
    batch_size: int,
    tokenizer: PreTrainedTokenizerBase,
    is_chat: bool,
    on_rows: Callable[[int], None] | None = None,
) -> list[list[Row]]:
    """All rows in batches, by length, the longest first: what does not fit into memory then shows at once.

    Args:
        rows: in any order; those of one length keep it.
        batch_size: rows of a batch at most.
        tokenizer: the target's.
        is_chat: see `token_ids_of`.
        on_rows: is called with the number of rows that have just been measured.

    Raises:
        ConfigError: as `token_ids_of`.
    """
    lens: list[int] = []
    for begin in range(0, len(rows), _CHUNK_LEN):
        chunk = rows[begin : begin + _CHUNK_LEN]
        lens += map(len, token_ids_of(chunk, tokenizer, is_chat))
        if on_rows is not None:
            on_rows(len(chunk))
    order = sorted(range(len(rows)), key=lambda place: -lens[place])
    ordered = [rows[place] for place in order]
    return [ordered[begin : begin + batch_size] for begin in range(0, len(ordered), batch_size)]


def _chat_text(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    messages = [{"role": "user", "content": row.content}] if isinstance(row.content, str) else row.content
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer must have a chat template for {row.place}, got none; give prompts as plain text"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except _TEMPLATE_ERRORS as error:
        raise ConfigError(
            f"messages must fit the tokenizer's chat template, got {type(error).__name__} ({error}) at {row.place}; "
            "look at their roles and contents"
        ) from error
