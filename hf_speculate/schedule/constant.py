"""The constant schedule: the same draft length in every round."""

from hf_speculate.schedule.base import RoundOutcome


class ConstantSchedule:
    """Drafts `num_draft_tokens` tokens in every round; 0 decodes token by token."""

    def __init__(self, num_draft_tokens: int):
        self._num = num_draft_tokens

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return self._num

    def begin(self, prompt_s: float, num_prompt_tokens: int, num_left: int) -> None:
        """Does nothing."""

    def update(self, outcome: RoundOutcome) -> None:
        """Does nothing."""
