"""Schedule protocol with its inputs before and after a round and the resulting choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

UNKNOWN_STEP_RATIO = 0.2  # seconds of a draft step over a plain step for a source of unknown size


@dataclass(frozen=True)
class DraftPrior:
    """Prior costs of a draft source.

    Args:
        step_ratio: Duration of a draft step divided by the duration of a plain step, estimated from
            the bytes that both read. None if unknown.
        is_parallel: Whether one step drafts all tokens of a round.
        is_verification_known: Whether the target scores a few tokens about as fast as one token.
            False for quantised weights, because their matmuls often run row by row.
    """

    step_ratio: float | None = 0.0
    is_parallel: bool = False
    is_verification_known: bool = True

    @property
    def never_pays(self) -> bool:
        """Whether drafting and verifying K tokens takes longer than K + 1 plain steps."""
        is_slow = self.is_verification_known and (self.step_ratio or 0.0) >= 1
        return is_slow and not self.is_parallel

    def draft_steps(self, num_draft_tokens: int) -> float:
        """Return the cost of drafting K tokens in plain steps, without reading the prompt."""
        ratio = UNKNOWN_STEP_RATIO if self.step_ratio is None else self.step_ratio
        return ratio * (1 if self.is_parallel else num_draft_tokens)


class RowAhead(NamedTuple):
    """A live row before a round.

    In lock step, there is only one entry, the slowest row.
    """

    row_id: int
    num_left: int  # number of tokens that the row may still emit, >= 1
    proposed: Sequence[float] = ()
    """[N] probability of accepting each token of a free proposal and all tokens before it."""


class Choice(NamedTuple):
    """The draft chosen for the next round."""

    num_draft_tokens: int  # K, maximum number of tokens to verify per row; 0 for a plain step
    num_model_tokens: int = 0  # how many of these a model or head drafts; 0 not to call it
    is_trial: bool = False
    """Whether the round only measures the source. Rows of equal length then stay equal, because
    plain steps are slower for rows of different lengths (by 2.5 % for 8 rows in a small model)."""


PLAIN_STEP = Choice(0)


class RowOutcome(NamedTuple):
    """A live row after a round."""

    row_id: int
    num_drafted: int  # number of verified tokens
    num_accepted: int
    num_emitted: int
    is_model: bool = True  # whether a model or head drafted the tokens; False for a free proposal


class RoundOutcome(NamedTuple):
    """Token counts and seconds of a round."""

    rows: Sequence[RowOutcome]  # the live rows of the choice, in the same order
    num_rows: int  # B, number of rows per forward, including finished rows kept in the batch
    num_draft_tokens: int  # K, width of the verified draft; 0 for a plain step
    num_model_tokens: int = 0  # tokens requested from a model or head; 0 if it was not called
    num_fed: int = 0  # tokens per row that the model or head read before its first draft token
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
            num_read: Number of prompt tokens per row read in this prefill, >= 1.
        """
        return

    def choose(
        self, rows: Sequence[RowAhead], num_rows: int, max_tokens: int, num_unread: int = 0
    ) -> Choice:
        """Choose K for the next round.

        Args:
            rows: Live rows, at least one.
            num_rows: B, number of rows per forward, including finished rows kept in the batch.
            max_tokens: Maximum number of tokens to draft per row, >= 0.
            num_unread: Number of tokens per row that a model or head must read before drafting.
        """

    def update(self, outcome: RoundOutcome) -> None:
        """Update the estimates after the round for the last choice."""
        return
