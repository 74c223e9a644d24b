"""The constant schedule: the same draft length in every round."""

from hf_speculate.schedule.base import RoundOutcome, Schedule

_FEWEST_LEFT = 32  # tokens to come, of which a plain step costs at most 3 % of the call


class ConstantSchedule(Schedule):
    """Drafts `num_draft_tokens` tokens in every round; 0 decodes token by token.

    Args:
        num_draft_tokens: K.
        begins_plain: whether the first round is a plain step, which measures plain decoding; not in short calls.
    """

    def __init__(self, num_draft_tokens: int, begins_plain: bool = False):
        self.num_draft_tokens, self._constant, self._begins_plain = num_draft_tokens, num_draft_tokens, begins_plain

    def begin(self, prefill_s: float, num_read: int, num_unread: int, num_left: int) -> None:
        if self._begins_plain and num_left >= _FEWEST_LEFT:
            self.num_draft_tokens = 0

    def update(self, outcome: RoundOutcome) -> None:
        self.num_draft_tokens = self._constant
