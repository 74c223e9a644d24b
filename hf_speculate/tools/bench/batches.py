"""Groups prompts into batches of token ids."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_speculate.generation.continuous import left_padded

ItemT = TypeVar("ItemT")


class Batch(NamedTuple):
    """Prompts that one call decodes."""

    number: int  # among all batches, from 0
    input_ids: Tensor  # [B, T] int64, left-padded
    attention_mask: Tensor  # [B, T] int64, left-padded
    category: str = ""  # of all its prompts; empty if they have none, or several

    @property
    def rows(self) -> list[Tensor]:
        """Token ids [T] of each prompt without padding."""
        return [ids[mask != 0] for ids, mask in zip(self.input_ids, self.attention_mask, strict=True)]

    @property
    def inputs(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


def take_in_turn(items: Sequence[ItemT], categories: Sequence[str], num: int | None) -> list[ItemT]:
    """The first `num` items (None for all), taken from each category in turn."""
    by_category: dict[str, list[ItemT]] = {}
    for item, category in zip(items, categories, strict=True):
        by_category.setdefault(category, []).append(item)
    most = max(map(len, by_category.values()), default=0)
    return [group[turn] for turn in range(most) for group in by_category.values() if turn < len(group)][:num]


def make_batches(
    prompts: Sequence[Sequence[int]],
    categories: Sequence[str],
    pad_token_id: int,
    batch_size: int,
    device: torch.device,
) -> list[Batch]:
    """Group prompts into full batches of one category each; the remaining prompts form mixed batches."""
    full: list[tuple[str, list[Sequence[int]]]] = []
    waiting: dict[str, list[Sequence[int]]] = {}
    for ids, category in zip(prompts, categories, strict=True):
        group = waiting.setdefault(category, [])
        group.append(ids)
        if len(group) == batch_size:
            full.append((category, waiting.pop(category)))
    rest = [(category, ids) for category, group in waiting.items() for ids in group]
    for start in range(0, len(rest), batch_size):
        some = rest[start : start + batch_size]
        found = {category for category, _ in some}
        full.append((found.pop() if len(found) == 1 else "", [ids for _, ids in some]))
    return [
        Batch(number, *left_padded(group, pad_token_id, device), category)
        for number, (category, group) in enumerate(full)
    ]
