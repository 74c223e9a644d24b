"""The protocol of a schedule: what it is told before and after a round, and what it chooses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

UNKNOWN_STEP_RATIO = 0.2  # draft step over plain step, for a source of unknown size


@dataclass(frozen=True)
class DraftPrior:
    """Costs of a draft source before its first round.

    Args:
        step_ratio: seconds of a draft step over those of a plain step, from the bytes that both read.
            None if nothing is known of the drafter.
        is_parallel: whether one step drafts all tokens of a round.
        is_verification_known: whether the target scores a few tokens about as fast as one. False
            for quantised weights, whose products are often computed row by row.
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
        """Return the plain steps that a draft of K tokens takes, without reading a prompt."""
        ratio = UNKNOWN_STEP_RATIO if self.step_ratio is None else self.step_ratio
        return ratio * (1 if self.is_parallel else num_draft_tokens)


class RowAhead(NamedTuple):
    """A live row before a round; one entry, the slowest row, if rows move in lock step."""

    row_id: int
    num_left: int  # tokens that it may still emit, >= 1
    proposed: Sequence[float] = ()
    """[N] probability of each token of a free proposal that it is accepted with all before it."""


class Choice(NamedTuple):
    """The draft of the next round."""

    num_draft_tokens: int  # K, tokens that are verified in a row at most; 0 is a plain step
    num_model_tokens: int = 0  # tokens that a model or head drafts of them; 0: it is not called
    is_trial: bool = False
    """Whether the round only measures the source. Rows of equal lengths then stay equal, because
    plain steps are slower for rows of different lengths (by 2.5 % for 8 rows of a small model)."""


PLAIN_STEP = Choice(0)


class RowOutcome(NamedTuple):
    """A live row after a round."""

    row_id: int
    num_drafted: int  # tokens that were verified
    num_accepted: int
    num_emitted: int
    is_model: bool = True  # whether its tokens came from a model or head, and not from a free proposal


class RoundOutcome(NamedTuple):
    """The outcome of a round: emitted tokens and seconds."""

    rows: Sequence[RowOutcome]  # the live rows that were there before the round, in their order
    num_rows: int  # B, rows in the forwards, including finished rows that stay in the batch
    num_draft_tokens: int  # K, width of the verified draft; 0 in a plain step
    num_model_tokens: int = 0  # tokens that a model or head was asked for; 0 if it was not called
    num_fed: int = 0  # tokens of each row that the model or head read before its first draft
    draft_s: float = 0.0
    score_s: float = 0.0
    other_s: float = 0.0  # verifying, trimming, cropping and recording

    @property
    def seconds(self) -> float:
        """Seconds of the whole round."""
        return self.draft_s + self.score_s + self.other_s


class Schedule(Protocol):
    """Chooses what each round of a call drafts."""

    def begin(self, prefill_s: float, num_read: int) -> None:
        """Prepare for the rounds of a call.

        Args:
            prefill_s: seconds of the target's prefill.
            num_read: prompt tokens of each row that the target read in it, >= 1.
        """
        return

    def choose(self, rows: Sequence[RowAhead], num_rows: int, max_tokens: int, num_unread: int = 0) -> Choice:
        """Choose what the next round drafts.

        Args:
            rows: the live rows, at least one.
            num_rows: B, rows in the forwards, including finished rows that stay in the batch.
            max_tokens: tokens that a row may draft at most, >= 0.
            num_unread: tokens of each row that a model or head reads before its first draft.
        """

    def update(self, outcome: RoundOutcome) -> None:
        """Learn from the round that was chosen last."""
        return
