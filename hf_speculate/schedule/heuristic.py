"""The heuristic schedule: transformers' rule for the draft length."""

from hf_speculate.config import MAX_ASSISTANT_TOKENS
from hf_speculate.schedule.base import RoundOutcome, Schedule


class HeuristicSchedule(Schedule):
    """Adds two tokens after a fully accepted draft and removes one after a rejection.

    A batch counts as fully accepted if at least half of its rows were. transformers carries the number over to the next
    call under the name "heuristic"; here both of its names start every call from the same number.
    """

    def __init__(self, num_draft_tokens: int):
        self.num_draft_tokens = num_draft_tokens

    def update(self, outcome: RoundOutcome) -> None:
        pairs = zip(outcome.num_drafted, outcome.num_accepted, strict=True)
        num_full = sum(accepted >= drafted for drafted, accepted in pairs)
        step = 2 if 2 * num_full >= len(outcome.num_drafted) else -1
        self.num_draft_tokens = min(max(self.num_draft_tokens + step, 1), MAX_ASSISTANT_TOKENS)
