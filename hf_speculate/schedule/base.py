"""What every schedule does."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class RoundOutcome(NamedTuple):
    """What a round brought and what it took."""

    row_ids: Sequence[int]  # [N] places in the output of the rows that were live; one entry for rows in lock step
    num_drafted: Sequence[int]  # [N] drafted tokens of each that counted
    num_accepted: Sequence[int]  # [N] those that the verifier kept
    num_draft_tokens: int  # K, what the drafter was asked for; 0 in a plain step
    num_rows: int  # B, rows in the forwards, finished ones among them where they stay
    num_left: Sequence[int] = ()  # [N] tokens that each may emit after this round, 0 where it stopped; empty: unknown
    num_fed: int = 0  # tokens of each row that the drafter read before its first draft; 0 where it was not called
    draft_s: float = 0.0
    score_s: float = 0.0
    other_s: float = 0.0  # verifying, trimming, cropping and writing


class Schedule(Protocol):
    """Decides the draft's length; its state lives for one call."""

    @property
    def num_draft_tokens(self) -> int:
        """Tokens to draft next, >= 0; 0 asks for a plain step."""

    def begin(self, prompt_s: float, num_prompt_tokens: int, num_left: int) -> None:
        """Learn what is ahead.

        Args:
            prompt_s: seconds that the target took to read the prompt.
            num_prompt_tokens: tokens of each row that it read.
            num_left: tokens that a row may emit in rounds.
        """

    def update(self, outcome: RoundOutcome) -> None:
        """Learn from a round."""
