"""Draft length: how many tokens the next round drafts, from the schedule and the room that rows have left."""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_speculate.draft.base import Drafter
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.call_schedule import make_schedule
from hf_speculate.engine.observers import Observer
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.ranks import ONE_PROCESS, Ranks
from hf_speculate.engine.stage_clock import Stage
from hf_speculate.schedule import RoundOutcome, RowGain, Schedule
from hf_speculate.types import RoundRecord, StageSeconds


@dataclass
class DraftLength(Observer):
    """Asks a schedule for K, and tells it about every round; in lock step, all rows count as one, the slowest."""

    stage = Stage.RECORD
    schedule: Schedule
    max_new_tokens: int
    is_lock_step: bool = False
    counts_drafted: bool = False  # whether the drafter may draft fewer tokens than K, and the schedule is told of these
    reads_ahead: bool = False  # whether the drafter reads prompts before the first round in any case
    ranks: Ranks = ONE_PROCESS  # the largest K of all ranks counts; finished ranks go on until all are
    group: Ranks = ONE_PROCESS  # rank 0's schedule counts; one process if every rank's asks for the same K

    @classmethod
    def of(cls, plan: Plan, drafter: Drafter) -> "DraftLength":
        """The draft length of a planned call."""
        call = plan.call
        reads_clock = call.config.schedule == "adaptive" and drafter.max_draft_tokens != 0
        return cls(
            make_schedule(plan, drafter),
            call.max_new_tokens,
            plan.is_lock_step,
            counts_drafted=drafter.drafts_fewer,
            reads_ahead=call.row_lists.rows_leave,
            ranks=call.ranks,
            group=call.ranks if reads_clock else ONE_PROCESS,
        )

    def begin(self, prefill_s: float, num_read: int, num_unread: int) -> None:
        """Prepare for the first round, from the seconds and columns of the target's prefill."""
        num_unread = 0 if self.reads_ahead else num_unread
        self.schedule.begin(prefill_s, num_read, num_unread, self.max_new_tokens - 1)

    def next(self, batch: Batch, room: Sequence[int], target_room: int | None = None) -> int | None:
        """The next draft length: the schedule's, within the rows' limits and the room that is left; None at the end.

        `room` [B] is what the drafter can draft in each row. `target_room` is how many drafted tokens the target can
        read in all rows, None for any number.
        """
        if target_room is not None:
            target_room = self.ranks.min(target_room)
        rows = zip(batch.num_left, batch.draft_limits, room, batch.is_finished, strict=True)
        live = [(left, min(limit, most)) for left, limit, most, is_finished in rows if not is_finished]
        num = None
        if live:
            most = max(min(left - 1, limit) for left, limit in live)
            if self.is_lock_step:
                most = min(max(left for left, _ in live) - 1, min(limit for _, limit in live))
            if target_room is not None:
                most = min(most, target_room)
            num_wanted = self.group.broadcast_number(self.schedule.num_draft_tokens)
            num = max(min(num_wanted, most), 0)
        return self.ranks.max(num)

    def keeps_rows_even(self, batch: Batch) -> bool:
        """Whether all rows must emit the same number of tokens in the round that `next` was asked for.

        Never in a tensor-parallel group: the schedules of its ranks may differ, and only their K is synchronised.
        """
        return self.schedule.is_probe and not self.group.is_group and batch.tokens.row_lens.is_even

    def on_end(self, num_new_tokens: int, seconds: StageSeconds) -> None:
        self.schedule.end()

    def on_round(self, record: RoundRecord) -> None:
        live = [row for row in record.live_rows if record.is_served[row]]
        if not record.num_round or not live:
            return
        verified, trimmed, seconds = record.verified, record.trimmed, record.seconds
        gains = {
            row: RowGain(
                record.row_ids[row], trimmed.num_emitted[row], 0 if trimmed.is_stopped[row] else record.num_left[row]
            )
            for row in record.live_rows
        }
        num_drafted = [verified.num_drafted[row] for row in live]
        num_accepted = [verified.num_accepted[row] for row in live]
        row_ids, num_emitted, num_left = map(list, zip(*(gains.pop(row) for row in live), strict=True))
        if self.is_lock_step:
            row_ids, num_left, num_emitted = row_ids[:1], [max(num_left)], [min(num_emitted)]
            num_drafted, num_accepted = [min(num_drafted)], [min(num_accepted)]
        num_asked = record.draft.token_ids.shape[1] if self.counts_drafted else record.num_draft_tokens
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
                num_emitted,
                list(gains.values()),  # these say nothing of the drafter, but plain decoding has them in its steps
            )
        )
