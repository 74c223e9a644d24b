"""The protocol of a schedule, and the round outcome that it learns from."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class RowGain(NamedTuple):
    """The outcome of a round for one row."""

    row_id: int
    num_emitted: int
    num_left: int  # tokens that it may still emit, 0 if it stopped


class RoundOutcome(NamedTuple):
    """The outcome of a round: emitted tokens and seconds."""

    row_ids: Sequence[int]  # [N] output rows that were live; one entry if rows move in lock step
    num_drafted: Sequence[int]  # [N] drafted tokens of each row that counted
    num_accepted: Sequence[int]  # [N] drafted tokens that the verifier accepted
    num_draft_tokens: int  # K, the number that the drafter was asked for; 0 in a plain step
    num_rows: int  # B, rows in the forwards, including finished rows that stay in the batch
    num_left: Sequence[int] = ()  # [N] tokens that each row may still emit, 0 if it stopped; empty if unknown
    num_fed: int = 0  # tokens of each row that the drafter read before its first draft; 0 if it was not called
    draft_s: float = 0.0
    score_s: float = 0.0
    other_s: float = 0.0  # verifying, trimming, cropping and recording
    num_emitted: Sequence[int] = ()  # [N] tokens that each row gained; empty if one more than were accepted
    others: Sequence["RowGain"] = ()  # live rows that the drafter could not draft for

    @property
    def seconds(self) -> float:
        """Seconds of the whole round."""
        return self.draft_s + self.score_s + self.other_s


class Schedule(Protocol):
    """Chooses the draft length K; its state lives for one call."""

    num_draft_tokens: int
    """Tokens to draft in the next round, >= 0; 0 is a plain step."""

    is_probe: bool = False
    """Whether the next round is a single drafted round among plain steps, to measure acceptance.

    If all rows have the same length, each then emits only as many tokens as the row with the fewest, because plain
    steps are slower for rows of different lengths (by 2.5 % for 8 rows of a small model on a CPU).
    """

    def begin(self, prefill_s: float, num_read: int, num_unread: int, num_left: int) -> None:
        """Prepare for the rounds of a call.

        Args:
            prefill_s: seconds of the target's prefill.
            num_read: prompt tokens of each row that the target read in it, >= 1.
            num_unread: prompt tokens of each row that the drafter has yet to read.
            num_left: tokens that a row may emit in rounds.
        """
        return

    def update(self, outcome: RoundOutcome) -> None:
        """Learn from a round."""
        return

    def end(self) -> None:
        """Called after the last round, whose outcome the schedule does not get if the drafter had ended before."""
        return
