"""Row groups: logits processors and stopping criteria of a batch; rows with equal ones are processed together."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessor, MaxLengthCriteria, StoppingCriteria

from hf_speculate.engine.call import RowLists
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.of_rows import RowCriteria, RowProcessors, StopVerdict, TokenRows
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria
from hf_speculate.transfers import upload

Settings = TypeVar("Settings", bound=Iterable[Any])
_Group = tuple[Settings, list[int]]  # the rows of the batch that they are for, in ascending order


class RefilledRows(RowLists):
    """Makes lists that the rows of other calls may join."""

    rows_leave = True

    def __init__(self, first_row: int):
        self.first_row = first_row

    def processors(self, processors: BlockLogitsProcessorList, num_rows: int) -> RowProcessors:
        return ProcessorGroups(processors, num_rows)

    def criteria(self, criteria: BlockStoppingCriteria, num_rows: int, max_length: int) -> RowCriteria:
        if not criteria.is_row_wise:
            return criteria
        return StoppingGroups(criteria, [min(max_length, criteria.max_length or max_length)] * num_rows)


class ProcessorGroups:
    """Runs every row's own logits processors on all K+1 positions of a round."""

    can_join = True

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
        """See `BlockLogitsProcessorList.__call__`, in the block form."""
        if len(self._groups) == 1:
            return self._groups[0][0](input_ids, scores, draft_token_ids, prefix_lens)
        processed = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        for processors, rows in self._groups:
            index = upload(rows, scores.device)
            drafted = None if draft_token_ids is None else draft_token_ids[index]
            lens = None if prefix_lens is None else [prefix_lens[row] for row in rows]
            part = processors(input_ids[index], scores[index], drafted, lens)
            processed.index_copy_(0, index, part.to(processed))
        return processed

    @property
    def reads_token_ids(self) -> bool:
        return any(processors.reads_token_ids for processors, _ in self._groups)

    @property
    def keep_nan(self) -> bool:
        return all(processors.keep_nan for processors, _ in self._groups)

    def forked(self) -> "ProcessorGroups":
        """Return the groups themselves: rows of different calls join only if no processor has state."""
        return self

    def split_warp(self) -> tuple[RowProcessors, dict[str, Any]]:
        """See `RowProcessors.split_warp`; rows of several groups are warped group by group."""
        return self._groups[0][0].split_warp() if len(self._groups) == 1 else (self, {})

    def rollback(self, num_calls: Sequence[int]) -> None:
        for processors, rows in self._groups:
            processors.rollback([num_calls[row] for row in rows])

    def rows(self, indices: Sequence[int]) -> "ProcessorGroups":
        self._groups = [(processors.rows(at), rows) for processors, at, rows in _kept(self._groups, indices)]
        return self

    def join(self, other: "ProcessorGroups") -> None:
        self._groups = _joined(self._groups, other._groups)


class StoppingGroups:
    """Runs every row's own stopping criteria, none of them foreign, on a round's new tokens."""

    def __init__(self, criteria: BlockStoppingCriteria, max_lengths: Sequence[int]):
        self._max_lengths = list(max_lengths)
        rest = BlockStoppingCriteria(criterion for criterion in criteria if type(criterion) is not MaxLengthCriteria)
        self._groups: list[_Group[BlockStoppingCriteria]] = [(rest, list(range(len(max_lengths))))]

    def __call__(self, tokens: TokenRows, new_ids: Sequence[list[int]]) -> StopVerdict:
        num_emitted, is_done = [len(ids) for ids in new_ids], [False] * len(new_ids)
        for criteria, rows in self._groups:
            some = tokens
            if len(rows) < len(new_ids):
                some = _SomeRows(tokens.token_ids[rows], [tokens.lens[row] for row in rows])
            verdict = criteria(some, [new_ids[row] for row in rows])
            for row, num, done in zip(rows, *verdict, strict=True):
                num_emitted[row], is_done[row] = num, done
        for row, (length, most, ids) in enumerate(zip(tokens.lens, self._max_lengths, new_ids, strict=True)):
            if ids and length + num_emitted[row] >= most:
                num_emitted[row], is_done[row] = max(1, most - length), True
        return StopVerdict(num_emitted, is_done)

    def rows(self, indices: Sequence[int]) -> None:
        self._groups = [(criteria, rows) for criteria, _, rows in _kept(self._groups, indices)]
        self._max_lengths = [self._max_lengths[row] for row in indices]

    def join(self, other: Any) -> None:
        self._groups = _joined(self._groups, other._groups)
        self._max_lengths += other._max_lengths


class _SomeRows(NamedTuple):
    """Some rows of `TokenRows`."""

    token_ids: Tensor
    lens: list[int]


def _kept(
    groups: Iterable[_Group[Settings]], indices: Sequence[int]
) -> Iterator[tuple[Settings, list[int], list[int]]]:
    """Of each group that keeps rows: its settings, the places of these rows in the group, and their new numbers."""
    numbers = {row: number for number, row in enumerate(indices)}
    for settings, rows in groups:
        pairs = sorted((numbers[row], at) for at, row in enumerate(rows) if row in numbers)
        if pairs:
            yield settings, [at for _, at in pairs], [number for number, _ in pairs]


def _joined(mine: list[_Group[Settings]], others: list[_Group[Settings]]) -> list[_Group[Settings]]:
    """Return the groups of both batches, the rows of the second one behind those of the first."""
    groups, num_rows = list(mine), sum(len(rows) for _, rows in mine)
    for settings, rows in others:
        moved = [row + num_rows for row in rows]
        for at, (same, before) in enumerate(groups):
            if is_equal(list(same), list(settings)):
                groups[at] = same, before + moved
                break
        else:
            groups.append((settings, moved))
    return groups


def is_equal(mine: Any, other: Any) -> bool:
    """Return whether two processors or criteria, or values in them, do the same; objects without fields must be one."""
    if mine is other:
        return True
    if type(mine) is not type(other):
        return False
    if isinstance(mine, Tensor):
        return mine.device == other.device and torch.equal(mine, other)
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(is_equal(value, other[key]) for key, value in mine.items())
    if isinstance(mine, list | tuple):
        return len(mine) == len(other) and all(map(is_equal, mine, other))
    if isinstance(mine, bool | int | float | str | bytes | frozenset | set | torch.device | torch.dtype | None):
        return bool(mine == other)
    if not isinstance(mine, LogitsProcessor | StoppingCriteria):
        return False
    if isinstance(getattr(mine, "prompt_ignore_length", None), Tensor):
        return False  # one number per row
    return is_equal(vars(mine), vars(other))
