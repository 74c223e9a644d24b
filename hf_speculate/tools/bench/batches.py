"""Makes batches of token ids from prompts."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_speculate.tools.dataset.encoding import padded

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
    prompts: Sequence[Sequence[int]],
    categories: Sequence[str],
    pad_token_id: int,
    batch_size: int,
    device: torch.device,
) -> list[Batch]:
    """Prompts in full batches of one category each; what is left over makes batches of several categories.

    Args:
        prompts: token ids of each, at least one prompt with at least one token.
        categories: one per prompt.
        pad_token_id: what fills shorter prompts up, on the left.
        batch_size: rows of a batch at most.
        device: where ids are put.
    """
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
        its_categories = {category for category, _ in some}
        full.append((its_categories.pop() if len(its_categories) == 1 else "", [ids for _, ids in some]))
    return [
        Batch(number, *padded(group, pad_token_id, device), category) for number, (category, group) in enumerate(full)
    ]
