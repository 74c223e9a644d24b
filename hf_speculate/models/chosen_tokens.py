"""Chosen tokens: the tokens that follow a query, and where rows end among them."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.cache.row_lens import ArangeCache


class Chosen(NamedTuple):
    """Tokens of every row, and what they were chosen from."""

    token_ids: Tensor  # [B, N] int64
    token_logits: Tensor | None = None  # [B, N, V]; None if nobody reads them
    logsumexp: Tensor | None = None  # [B, N] float32 of the logits, if the step has computed it


def joined(chosen: Sequence[Chosen]) -> Chosen:
    """Tokens that follow one another."""
    columns: Any = zip(*chosen, strict=True)
    parts: list[Any] = [None if column[0] is None else torch.cat(column, dim=1) for column in columns]
    return Chosen(*parts)


class ChosenTokens:
    """The tokens that are chosen one by one after a query, and where rows end among them."""

    def __init__(
        self,
        stop_ids: Tensor | None,  # [E] int64, ids after which a row needs no further token; None for none
        counts: ArangeCache,  # int32, on the device of the tokens
    ):
        self.chosen: list[Chosen] = []
        self._stop_ids = stop_ids
        self._counts = counts
        self._are_last: list[Tensor] = []  # by token, [B] bool: rows that need no other; empty if only ids end rows
        self._is_ended: Tensor | None = None  # [B] bool, of the tokens that `are_enough` has looked at

    def add(self, chosen: Chosen, are_last: Tensor | None = None) -> None:
        """Add tokens; `are_last` [B] bool are rows that need none after a single one, whatever its id."""
        self.chosen.append(chosen)
        if are_last is not None:
            self._are_last.append(are_last)

    def are_enough(self) -> bool:
        """Whether no row needs another token, asked after each; False where the answer would have to be waited for."""
        newest = self.chosen[-1].token_ids  # [B, 1]
        if newest.device.type != "cpu":
            return False
        ends = self._are_last[-1:]
        if self._stop_ids is not None:
            ends.append((newest == self._stop_ids).any(1))
        if not ends:
            return False
        if self._is_ended is not None:
            ends.append(self._is_ended)
        self._is_ended = reduce(torch.logical_or, ends)
        return bool(self._is_ended.all())

    def lens(self, token_ids: Tensor) -> Tensor:
        """[B] int32: the tokens of each row of [B, N], all that were chosen, up to the first that ends it."""
        counts = self._counts.span(1, token_ids.shape[1])
        go_on = [~torch.stack(self._are_last, dim=1)] if self._are_last else []  # each [B, N]
        stop_ids = self._stop_ids
        if stop_ids is not None:
            is_single = stop_ids.shape[0] == 1
            go_on.append(token_ids != stop_ids if is_single else (token_ids[:, :, None] != stop_ids).all(-1))
        if not go_on:
            return counts[-1:].repeat(token_ids.shape[0])
        return torch.where(reduce(torch.logical_and, go_on), counts[-1], counts).amin(1)
