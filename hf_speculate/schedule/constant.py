"""Schedules of transformers: the same draft length in every round, and its heuristic rule."""

from collections.abc import Sequence

from hf_speculate.config import MAX_ASSISTANT_TOKENS
from hf_speculate.schedule.base import Choice, RoundOutcome, RowAhead, Schedule


class ConstantSchedule(Schedule):
    """Draft `num_draft_tokens` tokens in every round; 0 decodes token by token."""

    def __init__(self, num_draft_tokens: int, max_model_tokens: int | None = None):
        self.num_draft_tokens = num_draft_tokens
        self.max_model_tokens = num_draft_tokens if max_model_tokens is None else max_model_tokens

    def choose(self, rows: Sequence[RowAhead], num_rows: int, max_tokens: int, num_unread: int = 0) -> Choice:
        num_tokens = max(min(self.num_draft_tokens, max_tokens), 0)
        return Choice(num_tokens, min(num_tokens, self.max_model_tokens))


class HeuristicSchedule(ConstantSchedule):
    """Add two tokens after a fully accepted draft and remove one after a rejection.

    A batch counts as fully accepted if at least half of its rows were. transformers carries the
    number over to the next call under the name "heuristic"; here both of its names start every call
    from the same number.
    """

    def update(self, outcome: RoundOutcome) -> None:
        num_full = sum(row.num_accepted >= row.num_drafted for row in outcome.rows)
        step = 2 if 2 * num_full >= len(outcome.rows) else -1
        self.num_draft_tokens = min(max(self.num_draft_tokens + step, 1), MAX_ASSISTANT_TOKENS)
