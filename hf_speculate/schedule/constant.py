"""Schedules from transformers: a constant draft length and a heuristic rule."""

from collections.abc import Sequence

from hf_speculate.config import MAX_ASSISTANT_TOKENS
from hf_speculate.schedule.base import PLAIN_STEP, Choice, RoundOutcome, RowAhead, Schedule

_MIN_LEFT = 32  # minimum number of remaining tokens, so a plain step costs at most 3 % of the call


class ConstantSchedule(Schedule):
    """Schedule with a constant K.

    Args:
        num_draft_tokens: K; 0 to decode token by token.
        max_model_tokens: Maximum number of these tokens that a model or head drafts. None for all.
        begins_plain: Whether the first round is a plain step that measures plain decoding. Short
            calls have no such step.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        max_model_tokens: int | None = None,
        begins_plain: bool = False,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.max_model_tokens = num_draft_tokens if max_model_tokens is None else max_model_tokens
        self._begins_plain = begins_plain

    def choose(
        self, rows: Sequence[RowAhead], num_rows: int, max_tokens: int, num_unread: int = 0
    ) -> Choice:
        begins_plain, self._begins_plain = self._begins_plain, False
        if begins_plain and max(row.num_left for row in rows) >= _MIN_LEFT:
            return PLAIN_STEP
        num_tokens = max(min(self.num_draft_tokens, max_tokens), 0)
        return Choice(num_tokens, min(num_tokens, self.max_model_tokens))


class HeuristicSchedule(ConstantSchedule):
    """Heuristic rule for K from transformers.

    K grows by two after a fully accepted draft and shrinks by one after a rejection. A batch counts
    as fully accepted if at least half of its rows were fully accepted. With "heuristic",
    transformers keeps K for the next call. Here, every call starts from the same K under either
    name of the rule.
    """

    def update(self, outcome: RoundOutcome) -> None:
        num_full = sum(row.num_accepted >= row.num_drafted for row in outcome.rows)
        step = 2 if 2 * num_full >= len(outcome.rows) else -1
        self.num_draft_tokens = min(max(self.num_draft_tokens + step, 1), MAX_ASSISTANT_TOKENS)
