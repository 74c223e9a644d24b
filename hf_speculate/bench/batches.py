"""Makes batches of token ids from prompts."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_speculate.errors import ConfigError

ItemT = TypeVar("ItemT")


class Batch(NamedTuple):
    """Prompts that are decoded in one call.

    Args:
        number: among all batches, from 0.
        input_ids: [B, T] int64, left-padded.
        attention_mask: [B, T] int64.
        category: of all its prompts; empty where they have none, or several.
    """

    number: int
    input_ids: Tensor
    attention_mask: Tensor
    category: str = ""

    @property
    def rows(self) -> list[Tensor]:
        """Each prompt's ids [T] without padding."""
        return [ids[mask != 0] for ids, mask in zip(self.input_ids, self.attention_mask, strict=True)]


def take_in_turn(items: Sequence[ItemT], categories: Sequence[str], num: int | None) -> list[ItemT]:
    """The first `num` items, one of each category in turn; all, in the same order, where `num` is None.

    Args:
        items: in order.
        categories: one per item.
        num: how many at most.
    """
    by_category: dict[str, list[ItemT]] = {}
    for item, category in zip(items, categories, strict=True):
        by_category.setdefault(category, []).append(item)
    most = max(map(len, by_category.values()), default=0)
    return [group[turn] for turn in range(most) for group in by_category.values() if turn < len(group)][:num]


def make_batches(
    texts: Sequence[str],
    categories: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    device: torch.device,
) -> list[Batch]:
    """Encode texts in full batches of one category each; what is left over makes batches of several categories.

    Args:
        texts: the prompts, at least one.
        categories: one per text.
        tokenizer: the target's; it pads on the left.
        batch_size: rows of a batch at most.
        device: where ids are put.

    Raises:
        ConfigError: a prompt has no tokens.
    """
    full: list[tuple[str, list[str]]] = []
    waiting: dict[str, list[str]] = {}
    for text, category in zip(texts, categories, strict=True):
        group = waiting.setdefault(category, [])
        group.append(text)
        if len(group) == batch_size:
            full.append((category, waiting.pop(category)))
    rest = [(category, text) for category, group in waiting.items() for text in group]
    for start in range(0, len(rest), batch_size):
        some = rest[start : start + batch_size]
        its_categories = {category for category, _ in some}
        full.append((its_categories.pop() if len(its_categories) == 1 else "", [text for _, text in some]))
    batches = []
    for number, (category, group) in enumerate(full):
        encoded = tokenizer(group, return_tensors="pt", padding=True, padding_side="left")
        mask = encoded["attention_mask"]
        if mask.shape[1] == 0 or int(mask.sum(-1).min()) == 0:
            raise ConfigError("each prompt must have one token at least, got an empty one; leave it out of the file")
        batches.append(Batch(number, encoded["input_ids"].long().to(device), mask.long().to(device), category))
    return batches
