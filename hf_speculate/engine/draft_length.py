"""Draft length: how many tokens the next round drafts, from the schedule and the room that rows have left."""

from hf_speculate.engine.batch import Batch
from hf_speculate.engine.observers import Observer
from hf_speculate.engine.stage_clock import Stage
from hf_speculate.schedule import RoundOutcome, Schedule
from hf_speculate.types import RoundRecord


class DraftLength(Observer):
    """Asks a schedule for K, and tells it about every round; in lock step, all rows count as one, the slowest.

    If the drafter may draft fewer tokens than K (`counts_drafted`), the schedule is told what was drafted instead of K.
    """

    stage = Stage.RECORD

    def __init__(
        self, schedule: Schedule, max_new_tokens: int, is_lock_step: bool = False, counts_drafted: bool = False
    ):
        self.schedule = schedule
        self._max_new_tokens = max_new_tokens
        self._is_lock_step = is_lock_step
        self._counts_drafted = counts_drafted

    def begin(self, prompt_s: float, num_read: int, num_unread: int) -> None:
        """Prepare for the first round, from the seconds and columns of the target's prompt."""
        num_unread = min(num_unread, num_read)
        self.schedule.begin(prompt_s * num_unread / num_read, num_unread, self._max_new_tokens - 1)

    def next(self, batch: Batch) -> int | None:
        """What the schedule asks for, within the rows' limits and the room that they have left; None at the end."""
        rows = zip(batch.num_left, batch.draft_limits, batch.is_finished, strict=True)
        live = [(left, limit) for left, limit, is_finished in rows if not is_finished]
        if not live:
            return None
        if self._is_lock_step:
            most = min(max(left for left, _ in live) - 1, min(limit for _, limit in live))
        else:
            most = max(min(left - 1, limit) for left, limit in live)
        return max(min(self.schedule.num_draft_tokens, most), 0)

    def on_round(self, record: RoundRecord) -> None:
        if not record.num_round:
            return
        live = [row for row, was_live in enumerate(record.was_live) if was_live]
        if not live:
            return
        verified, seconds = record.verified, record.seconds
        row_ids = [record.row_ids[row] for row in live]
        num_drafted = [verified.num_drafted[row] for row in live]
        num_accepted = [verified.num_accepted[row] for row in live]
        num_left = [record.num_left[row] for row in live]
        if self._is_lock_step:
            row_ids, num_left = row_ids[:1], [max(num_left)]
            num_drafted, num_accepted = [min(num_drafted)], [min(num_accepted)]
        num_asked = record.draft.token_ids.shape[1] if self._counts_drafted else record.num_draft_tokens
        self.schedule.update(
            RoundOutcome(
                row_ids,
                num_drafted,
                num_accepted,
                num_asked,
                len(record.row_ids),
                num_left,
                record.num_fed,
                seconds.draft,
                seconds.score,
                seconds.verify + seconds.bookkeeping,
            )
        )
