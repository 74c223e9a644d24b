"""Stopping criteria on blocks: find the token at which token-by-token decoding would stop."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_speculate.errors import UnsupportedGenerationError
from hf_speculate.processors.of_rows import StopVerdict, TokenRows
from hf_speculate.processors.registry import any_ids, is_registered, name_of
from hf_speculate.rows.per_row import PerRow

_KNOWN_TYPES = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
_HOST = torch.device("cpu")
# StopStringCriteria never matches an id past its vocabulary
_NO_TOKEN = torch.iinfo(torch.int64).max


class BlockStoppingCriteria(PerRow):
    """Stopping criteria that run on every prefix of a block.

    transformers' own criteria are recognised by exact type, and the time is checked once per block.
    Classes declared with `register_row_wise` are called on all prefixes of equal length together,
    with `scores=None`. Any other criterion is foreign and must not be called on blocks. All rows
    share the criteria, so none of them change as rows leave.
    """

    def __init__(self, criteria: Iterable[Any]) -> None:
        self._criteria = criteria_list = list(criteria)
        self._max_length_criteria = [c for c in criteria_list if type(c) is MaxLengthCriteria]
        self._max_time_criteria = [c for c in criteria_list if type(c) is MaxTimeCriteria]
        self._stop_string_criteria = [c for c in criteria_list if type(c) is StopStringCriteria]
        self._registered = [c for c in criteria_list if is_registered(c)]
        self._foreign = [
            c for c in criteria_list if not is_registered(c) and type(c) not in _KNOWN_TYPES
        ]
        eos_ids = [
            c.eos_token_id.flatten().tolist() for c in criteria_list if type(c) is EosTokenCriteria
        ]
        self._eos_token_ids = frozenset(chain.from_iterable(eos_ids))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._criteria)

    @property
    def is_row_wise(self) -> bool:
        return not self._foreign

    @property
    def reads_text_alone(self) -> bool:
        """Whether the text alone determines its end, without a clock or user code."""
        return not (self._max_time_criteria or self._registered or self._foreign)

    @property
    def foreign(self) -> list[Any]:
        """Criteria that are called token by token as in plain `generate()`, in list order."""
        return self._foreign

    @property
    def max_length(self) -> int | None:
        """Maximum length of a row, including padding; None without a MaxLengthCriteria."""
        return min((c.max_length for c in self._max_length_criteria), default=None)

    @property
    def eos_token_ids(self) -> frozenset[int] | None:
        """All EOS ids; None without an EOS criterion."""
        return self._eos_token_ids or None

    def __call__(self, tokens: TokenRows, new_ids: Sequence[list[int]]) -> StopVerdict:
        """Cut each row's new tokens after the first prefix at which any criterion stops."""
        if self._foreign:
            raise UnsupportedGenerationError(
                "a block must meet row-wise stopping criteria only, got "
                f"{', '.join(map(name_of, self._foreign))}; "
                "call the plain list after every token, or declare the class with register_row_wise"
            )
        num_emitted = [len(ids) for ids in new_ids]
        is_done = [False] * len(num_emitted)
        if not any(num_emitted):
            return StopVerdict(num_emitted, is_done)

        def cut(ends: Iterable[tuple[int, int]]) -> None:
            """End rows after the given numbers of new tokens, unless they ended earlier."""
            for row, length in ends:
                num_emitted[row], is_done[row] = min(num_emitted[row], length), True

        if self._max_time_criteria and bool(
            _ask(self._max_time_criteria, any_ids(1, 1, _HOST)).any()
        ):
            cut((row, len(ids)) for row, ids in enumerate(new_ids) if ids)
        cut(self._find_max_length(tokens.lens, [len(ids) for ids in new_ids]))
        cut(self._find_eos(new_ids))
        cut(self._find_stop_strings(tokens, new_ids))
        cut(self._find_registered(tokens, new_ids, num_emitted))
        return StopVerdict(num_emitted, is_done)

    def ask(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
        """Call the criteria as plain `generate` does, on sequences [B, T] of equal length.

        Return [B] bool.
        """
        return _ask(self._criteria, input_ids, scores)

    def _find_max_length(
        self, prefix_lens: Sequence[int], num_new: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        max_length = self.max_length
        if max_length is None:
            return
        lens = [prefix_len + num for prefix_len, num in zip(prefix_lens, num_new, strict=True)]
        for row, (prefix_len, num) in enumerate(zip(prefix_lens, num_new, strict=True)):
            if num and lens[row] >= max_length:
                yield row, max(1, max_length - prefix_len)
        for criterion in self._max_length_criteria:
            unfinished_len = min(max(lens), criterion.max_length - 1)
            if (
                criterion.max_position_embeddings is not None
                and unfinished_len > criterion.max_position_embeddings
            ):
                _ask([criterion], any_ids(1, unfinished_len, _HOST))  # the criterion warns once

    def _find_eos(self, new_ids: Sequence[list[int]]) -> Iterator[tuple[int, int]]:
        for row, ids in enumerate(new_ids):
            if not self._eos_token_ids.isdisjoint(ids):
                yield (
                    row,
                    next(
                        length
                        for length, token_id in enumerate(ids, 1)
                        if token_id in self._eos_token_ids
                    ),
                )

    def _find_stop_strings(
        self, tokens: TokenRows, new_ids: Sequence[list[int]]
    ) -> Iterator[tuple[int, int]]:
        """Call a criterion that reads only last tokens on all prefixes of a block at once."""
        for criterion in self._stop_string_criteria:
            width = max(1, criterion.maximum_token_len)
            windows = _tails(tokens, new_ids, width).unfold(1, width, 1)  # [B, N, width]
            is_stopped = _ask([criterion], windows.flatten(0, 1)).view(windows.shape[:2])  # [B, N]
            for row, stops_by_len in enumerate(is_stopped.tolist()):
                if True in stops_by_len:
                    yield row, stops_by_len.index(True) + 1

    def _find_registered(
        self, tokens: TokenRows, new_ids: Sequence[list[int]], num_emitted: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Call the criteria on unfinished prefixes, grouped by length."""
        if not self._registered:
            return []
        width = max(map(len, new_ids))
        token_ids = pad(tokens.token_ids[:, : max(tokens.lens)], (0, width))
        rows_by_len: dict[int, list[int]] = {}
        for row, (prefix_len, ids, num_row_tokens) in enumerate(
            zip(tokens.lens, new_ids, num_emitted, strict=True)
        ):
            token_ids[row, prefix_len : prefix_len + len(ids)] = torch.tensor(
                ids, dtype=torch.int64, device="cpu"
            )
            for num_tokens in range(1, num_row_tokens + 1):
                rows_by_len.setdefault(prefix_len + num_tokens, []).append(row)
        # A list, because a generator would turn a StopIteration in user code into a RuntimeError.
        answers = [
            _ask(self._registered, token_ids[rows, :length]) for length, rows in rows_by_len.items()
        ]
        pairs = [(length, row) for length, rows in rows_by_len.items() for row in rows]
        stops = zip(pairs, torch.cat(answers).tolist(), strict=True)
        return [
            (row, length - tokens.lens[row]) for (length, row), is_stopped in stops if is_stopped
        ]


def _ask(
    criteria: Iterable[Any], input_ids: Tensor, scores: tuple[Tensor, ...] | None = None
) -> Tensor:
    """Call criteria on ids [N, n] and return their answers [N] bool.

    If a criterion returns a single bool, it applies to every row.
    """
    plain: Callable[..., Tensor] = StoppingCriteriaList(criteria)
    return as_flags(plain(input_ids, scores))  # [N]


def as_flags(answers: Tensor) -> Tensor:
    """Convert the answers [N] of criteria to bool.

    Only the lowest bit of an integer counts, as in `generate`.
    """
    return answers if answers.dtype == torch.bool else (answers & 1).bool()


def _tails(tokens: TokenRows, new_ids: Sequence[list[int]], width: int) -> Tensor:
    """Join each row's last W-1 tokens and its new tokens, [B, W-1+N] int64.

    The remaining columns hold an id outside every vocabulary.
    """
    num_new = max(map(len, new_ids))
    rows = []
    for ids, length, after in zip(tokens.token_ids, tokens.lens, new_ids, strict=True):
        before = ids[max(length - width + 1, 0) : length].tolist()
        rows.append(
            [_NO_TOKEN] * (width - 1 - len(before))
            + before
            + after
            + [_NO_TOKEN] * (num_new - len(after))
        )
    return torch.tensor(rows, device="cpu")
