"""The same number of drafted tokens in every round."""

from hf_speculate.schedule.base import RoundOutcome


class ConstantSchedule:
    """Always the same number; 0 decodes token by token."""

    def __init__(self, num_draft_tokens: int):
        self._num = num_draft_tokens

    @property
    def num_draft_tokens(self) -> int:
        """The K it was made with."""
        return self._num

    def begin(self, prompt_s: float, num_prompt_tokens: int, num_left: int) -> None:
        """Nothing to decide."""

    def update(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""
