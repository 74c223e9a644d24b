"""Group a batch's rows that have equal logits processors or stopping criteria."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessor, MaxLengthCriteria, StoppingCriteria

from hf_speculate.engine.call import RowLists
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.of_rows import RowCriteria, RowProcessors, StopVerdict, TokenRows
from hf_speculate.processors.registry import offers_forced_text
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria
from hf_speculate.transfers import upload

Settings = TypeVar("Settings", bound=Iterable[Any])
_Group = tuple[Settings, list[int]]  # settings and the batch rows that use them, in ascending order


class RefilledRows(RowLists):
    """Row lists for continuous batching.

    The rows of other calls may join their processors and criteria.
    """

    rows_leave = True

    def __init__(self, first_row: int):
        self.first_row = first_row

    def processors(self, processors: BlockLogitsProcessorList, num_rows: int) -> RowProcessors:
        return ProcessorGroups(processors, num_rows)

    def criteria(
        self, criteria: BlockStoppingCriteria, num_rows: int, max_length: int
    ) -> RowCriteria:
        if not criteria.is_row_wise:
            return criteria
        return StoppingGroups(
            criteria, [min(max_length, criteria.max_length or max_length)] * num_rows
        )


class ProcessorGroups:
    """Logits processors of a batch, by row.

    The processors run on all K+1 positions of a round.
    """

    can_join = True
    capture_key = None  # rows with other processors may join

    def __init__(self, processors: BlockLogitsProcessorList, num_rows: int):
        self._groups: list[_Group[BlockLogitsProcessorList]] = [(processors, list(range(num_rows)))]

    def __len__(self) -> int:
        return max((len(processors) for processors, _ in self._groups), default=0)

    def __call__(
        self,
        input_ids: Tensor,
        scores: Tensor,
        draft_token_ids: Tensor | None = None,
        prefix_lens: Sequence[int] | None = None,
    ) -> Tensor:
        """Process logits like the block form of `BlockLogitsProcessorList.__call__`."""
        if len(self._groups) == 1:
            return self._groups[0][0](input_ids, scores, draft_token_ids, prefix_lens)
        processed = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        for processors, rows in self._groups:
            index = upload(rows, scores.device)
            drafted = None if draft_token_ids is None else draft_token_ids[index]
            lens = None if prefix_lens is None else [prefix_lens[row] for row in rows]
            group_scores = processors(input_ids[index], scores[index], drafted, lens)
            processed.index_copy_(0, index, group_scores.to(processed))
        return processed

    @property
    def reads_token_ids(self) -> bool:
        return any(processors.reads_token_ids for processors, _ in self._groups)

    @property
    def keep_nan(self) -> bool:
        return all(processors.keep_nan for processors, _ in self._groups)

    def forced_texts(self, tokens: TokenRows, is_asked: Sequence[bool]) -> list[str]:
        texts = [""] * len(is_asked)
        for processors, rows in self._groups:
            if not any(map(offers_forced_text, processors)):
                continue
            group_texts = processors.forced_texts(
                _some_of(tokens, rows), [is_asked[row] for row in rows]
            )
            for row, text in zip(rows, group_texts, strict=True):
                texts[row] = text
        return texts

    def forked(self) -> "ProcessorGroups":
        """Return the groups themselves, because their processors have no state."""
        return self

    def split_warp(self) -> tuple[RowProcessors, dict[str, Any]]:
        """See `RowProcessors.split_warp`; rows of several groups are warped group by group."""
        return self._groups[0][0].split_warp() if len(self._groups) == 1 else (self, {})

    def rollback(self, num_calls: Sequence[int]) -> None:
        for processors, rows in self._groups:
            processors.rollback([num_calls[row] for row in rows])

    def rows(self, indices: Sequence[int]) -> "ProcessorGroups":
        selected = _selected(self._groups, indices)
        self._groups = [
            (processors.rows(group_rows), rows) for processors, group_rows, rows in selected
        ]
        return self

    def join(self, other: "ProcessorGroups") -> None:
        self._groups = _joined(self._groups, other._groups)


class StoppingGroups:
    """Stopping criteria of a batch, by row.

    The criteria run on a round's new tokens and treat each row separately.
    """

    def __init__(self, criteria: BlockStoppingCriteria, max_lengths: Sequence[int]):
        self._max_lengths = list(max_lengths)
        others = BlockStoppingCriteria(
            criterion for criterion in criteria if type(criterion) is not MaxLengthCriteria
        )
        self._groups: list[_Group[BlockStoppingCriteria]] = [
            (others, list(range(len(max_lengths))))
        ]

    def __call__(self, tokens: TokenRows, new_ids: Sequence[list[int]]) -> StopVerdict:
        num_emitted, is_done = [len(ids) for ids in new_ids], [False] * len(new_ids)
        for criteria, rows in self._groups:
            verdict = criteria(_some_of(tokens, rows), [new_ids[row] for row in rows])
            for row, num_tokens, done in zip(rows, *verdict, strict=True):
                num_emitted[row], is_done[row] = num_tokens, done
        for row, (length, max_len, ids) in enumerate(
            zip(tokens.lens, self._max_lengths, new_ids, strict=True)
        ):
            if ids and length + num_emitted[row] >= max_len:
                num_emitted[row], is_done[row] = max(1, max_len - length), True
        return StopVerdict(num_emitted, is_done)

    def rows(self, indices: Sequence[int]) -> None:
        self._groups = [(criteria, rows) for criteria, _, rows in _selected(self._groups, indices)]
        self._max_lengths = [self._max_lengths[row] for row in indices]

    def join(self, other: Any) -> None:
        self._groups = _joined(self._groups, other._groups)
        self._max_lengths += other._max_lengths


class _SomeRows(NamedTuple):
    """Some rows of `TokenRows`."""

    token_ids: Tensor
    lens: list[int]


def _some_of(tokens: TokenRows, rows: Sequence[int]) -> TokenRows:
    """Select rows, in ascending order."""
    if len(rows) == len(tokens.lens):
        return tokens
    index = slice(rows[0], rows[0] + 1) if len(rows) == 1 else list(rows)  # a slice copies nothing
    return _SomeRows(tokens.token_ids[index], [tokens.lens[row] for row in rows])


def _selected(
    groups: Iterable[_Group[Settings]], indices: Sequence[int]
) -> Iterator[tuple[Settings, list[int], list[int]]]:
    """Select the rows `indices` of groups.

    For each group with remaining rows, yield its settings, the indices of these rows in the group,
    and their new indices in the batch.
    """
    new_indices = {row: new_index for new_index, row in enumerate(indices)}
    for settings, rows in groups:
        pairs = sorted(
            (new_indices[row], index) for index, row in enumerate(rows) if row in new_indices
        )
        if pairs:
            yield settings, [index for _, index in pairs], [new_index for new_index, _ in pairs]


def _joined(mine: list[_Group[Settings]], others: list[_Group[Settings]]) -> list[_Group[Settings]]:
    """Merge the groups of two batches; rows of the second batch follow those of the first."""
    groups, num_rows = list(mine), sum(len(rows) for _, rows in mine)
    for settings, rows in others:
        moved = [row + num_rows for row in rows]
        for index, (present, present_rows) in enumerate(groups):
            if is_equal(list(present), list(settings)):
                groups[index] = present, present_rows + moved
                break
        else:
            groups.append((settings, moved))
    return groups


def is_equal(mine: Any, other: Any) -> bool:
    """Return whether two processors or criteria, or values in them, have equal fields.

    Unknown objects are equal only to themselves.
    """
    if mine is other:
        return True
    if type(mine) is not type(other):
        return False
    if isinstance(mine, Tensor):
        return mine.device == other.device and torch.equal(mine, other)
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(
            is_equal(value, other[key]) for key, value in mine.items()
        )
    if isinstance(mine, list | tuple):
        return len(mine) == len(other) and all(map(is_equal, mine, other))
    if isinstance(
        mine, bool | int | float | str | bytes | frozenset | set | torch.device | torch.dtype | None
    ):
        return bool(mine == other)
    if not isinstance(mine, LogitsProcessor | StoppingCriteria):
        return False
    if isinstance(getattr(mine, "prompt_ignore_length", None), Tensor):
        return False  # numbers differ between rows
    return is_equal(vars(mine), vars(other))
