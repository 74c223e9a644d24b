"""Protocol of schedules, with its inputs before and after a round, and its choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

UNKNOWN_STEP_RATIO = 0.2  # draft step over plain step, for a source of unknown size


@dataclass(frozen=True)
class DraftPrior:
    """Prior costs of a draft source.

    Args:
        step_ratio: Ratio of the seconds of a draft step to those of a plain step, estimated from
            the bytes read by both. None if unknown.
        is_parallel: Whether one step drafts all tokens of a round.
        is_verification_known: Whether the target scores a few tokens about as fast as one. False
            for quantised weights, as their products are often computed row by row.
    """

    step_ratio: float | None = 0.0
    is_parallel: bool = False
    is_verification_known: bool = True

    @property
    def never_pays(self) -> bool:
        """Whether K drafts and a verification take longer than K + 1 plain steps."""
        is_slow = self.is_verification_known and (self.step_ratio or 0.0) >= 1
        return is_slow and not self.is_parallel

    def draft_steps(self, num_draft_tokens: int) -> float:
        """Return the cost of a draft of K tokens in plain steps, without reading a prompt."""
        ratio = UNKNOWN_STEP_RATIO if self.step_ratio is None else self.step_ratio
        return ratio * (1 if self.is_parallel else num_draft_tokens)


class RowAhead(NamedTuple):
    """A live row before a round.

    In lock step there is one entry, the slowest row.
    """

    row_id: int
    num_left: int  # tokens the row may still emit, >= 1
    proposed: Sequence[float] = ()
    """[N] probability of accepting each token of a free proposal and all before it."""


class Choice(NamedTuple):
    """The draft of the next round."""

    num_draft_tokens: int  # K, maximum tokens of a row to verify; 0 is a plain step
    num_model_tokens: int = 0  # tokens of these to draft with a model or head; 0: it is not called
    is_trial: bool = False
    """Whether the round only measures the source. Rows of equal lengths then stay equal, because
    plain steps are slower for rows of different lengths (by 2.5 % for 8 rows of a small model)."""


PLAIN_STEP = Choice(0)


class RowOutcome(NamedTuple):
    """A live row after a round."""

    row_id: int
    num_drafted: int  # verified tokens
    num_accepted: int
    num_emitted: int
    is_model: bool = True  # whether its tokens came from a model or head; False for a free proposal


class RoundOutcome(NamedTuple):
    """Emitted tokens and seconds of a round."""

    rows: Sequence[RowOutcome]  # live rows of the choice, in the same order
    num_rows: int  # B, rows in the forwards, including finished rows kept in the batch
    num_draft_tokens: int  # K, width of the verified draft; 0 in a plain step
    num_model_tokens: int = 0  # tokens requested from a model or head; 0 if it was not called
    num_fed: int = 0  # tokens of each row read by the model or head before its first draft
    draft_s: float = 0.0
    score_s: float = 0.0
    other_s: float = 0.0  # verifying, trimming, cropping and recording

    @property
    def seconds(self) -> float:
        """Seconds of the whole round."""
        return self.draft_s + self.score_s + self.other_s


class Schedule(Protocol):
    """Protocol for choosing the draft of each round."""

    def begin(self, prefill_s: float, num_read: int) -> None:
        """Prepare for the rounds of a call.

        Args:
            prefill_s: Seconds of the target's prefill.
            num_read: Prompt tokens of each row read in this prefill, >= 1.
        """
        return

    def choose(
        self, rows: Sequence[RowAhead], num_rows: int, max_tokens: int, num_unread: int = 0
    ) -> Choice:
        """Choose K for the next round.

        Args:
            rows: Live rows, at least one.
            num_rows: B, rows in the forwards, including finished rows kept in the batch.
            max_tokens: Maximum tokens to draft per row, >= 0.
            num_unread: Tokens of each row to be read by a model or head before its first draft.
        """

    def update(self, outcome: RoundOutcome) -> None:
        """Update the estimates after the round of the last choice."""
        return
