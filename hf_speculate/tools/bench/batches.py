"""Groups prompts into batches of token ids."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
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
    by_category: dict[str, list[ItemT]] = defaultdict(list)
    for item, category in zip(items, categories, strict=True):
        by_category[category].append(item)
    return [item for turn in zip_longest(*by_category.values()) for item in turn if item is not None][:num]


def make_batches(
    prompts: Sequence[Sequence[int]],
    categories: Sequence[str],
    pad_token_id: int,
    batch_size: int,
    device: torch.device,
) -> list[Batch]:
    """Group prompts into full batches of one category each; the remaining prompts form mixed batches."""
    groups: list[tuple[str, Sequence[Sequence[int]]]] = []
    waiting: dict[str, list[Sequence[int]]] = defaultdict(list)
    for ids, category in zip(prompts, categories, strict=True):
        waiting[category].append(ids)
        if len(waiting[category]) == batch_size:
            groups.append((category, waiting.pop(category)))
    rest = [(category, ids) for category, group in waiting.items() for ids in group]
    for start in range(0, len(rest), batch_size):
        found, group = zip(*rest[start : start + batch_size], strict=True)
        groups.append((found[0] if len(set(found)) == 1 else "", group))
    return [
        Batch(number, *left_padded(group, pad_token_id, device), category)
        for number, (category, group) in enumerate(groups)
    ]
