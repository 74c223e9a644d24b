"""Schedules of transformers: the same draft length in every round, and its heuristic rule."""

from collections.abc import Sequence

from hf_speculate.config import MAX_ASSISTANT_TOKENS
from hf_speculate.schedule.base import PLAIN_STEP, Choice, RoundOutcome, RowAhead, Schedule

_MIN_LEFT = 32  # tokens to come, of which a plain step costs at most 3 % of the call


class ConstantSchedule(Schedule):
    """Draft `num_draft_tokens` tokens in every round; 0 decodes token by token.

    Args:
        num_draft_tokens: K.
        max_model_tokens: tokens of them that a model or head drafts at most. None for all.
        begins_plain: whether the first round is a plain step, to measure plain decoding. Short calls
            have none.
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

    def choose(self, rows: Sequence[RowAhead], num_rows: int, max_tokens: int, num_unread: int = 0) -> Choice:
        begins_plain, self._begins_plain = self._begins_plain, False
        if begins_plain and max(row.num_left for row in rows) >= _MIN_LEFT:
            return PLAIN_STEP
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
