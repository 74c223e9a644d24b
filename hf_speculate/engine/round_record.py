"""Sums up what a round brought."""

from hf_speculate.engine.batch import Batch, DecoderSettings
from hf_speculate.engine.verification import Trimmed, Verified
from hf_speculate.schedule import RoundOutcome
from hf_speculate.types import RoundReport


def outcome_of(
    batch: Batch,
    settings: DecoderSettings,
    num_draft_tokens: int,
    num_fed: int,
    verified: Verified,
    trimmed: Trimmed,
) -> RoundOutcome:
    """What the schedule is told, but for the seconds; rows in lock step count as one, the slowest.

    Args:
        batch: the rows, before the round is written.
        settings: how they are treated.
        num_draft_tokens: K, what the drafter was asked for.
        num_fed: tokens of each row that it read before its first draft.
        verified: the verdict.
        trimmed: what of it comes before a stop.
    """
    live = _live(batch)
    row_ids = [batch.row_ids[row] for row in live]
    num_drafted = [verified.num_drafted[row] for row in live]
    num_accepted = [verified.num_accepted[row] for row in live]
    room = [settings.max_length - length for length in batch.tokens.lens]
    num_left = [0 if trimmed.is_stopped[row] else room[row] - trimmed.num_emitted[row] for row in live]
    if settings.is_lock_step:
        row_ids, num_left = row_ids[:1], [max(num_left)]
        num_drafted, num_accepted = [min(num_drafted)], [min(num_accepted)]
    num_rows = len(batch.is_finished)
    return RoundOutcome(row_ids, num_drafted, num_accepted, num_draft_tokens, num_rows, num_left, num_fed)


def report_of(batch: Batch, verified: Verified, trimmed: Trimmed) -> RoundReport:
    """What a callback is told, but for the seconds.

    Args:
        batch: the rows, before the round is written.
        verified: the verdict.
        trimmed: what of it comes before a stop.
    """
    live = _live(batch)
    return RoundReport(
        num_round=batch.num_rounds,
        row_ids=tuple(batch.row_ids[row] for row in live),
        num_drafted=tuple(verified.num_drafted[row] for row in live),
        num_accepted=tuple(verified.num_accepted[row] for row in live),
        num_emitted=tuple(trimmed.num_emitted[row] for row in live),
    )


def _live(batch: Batch) -> list[int]:
    return [row for row, done in enumerate(batch.is_finished) if not done]
