"""Draft length: choose the length of the next draft from the schedule and each row's room."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hf_speculate.config import MAX_ASSISTANT_TOKENS, SpeculationConfig
from hf_speculate.draft.base import Drafter
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.observers import Observer, lacks_plain_step
from hf_speculate.engine.plan import Plan, call_type_of
from hf_speculate.engine.ranks import ONE_PROCESS, Ranks
from hf_speculate.engine.runners import draft_lens
from hf_speculate.engine.stage_clock import Stage
from hf_speculate.engine.step_weights import draft_prior
from hf_speculate.models.language_model import vocab_size_of
from hf_speculate.models.memory import memory_bytes
from hf_speculate.schedule import (
    AdaptiveSchedule,
    Choice,
    ConstantSchedule,
    HeuristicSchedule,
    MemoryStore,
    RoundOutcome,
    RowAhead,
    RowOutcome,
    Schedule,
    ScheduleMemory,
)
from hf_speculate.types import RoundRecord

# Share of device memory for a round's logits [B, K+1, V] under an adaptive draft length.
LOGITS_SHARE = 1 / 8
_BASE = MAX_ASSISTANT_TOKENS + 1  # two draft lengths are sent to other ranks as one number


@dataclass
class DraftLength(Observer):
    """Link between a schedule and the decoding rounds.

    It asks the schedule for the length of each draft and reports every round to the schedule. In
    lock step, all rows count as one row, the slowest.
    """

    stage = Stage.RECORD
    schedule: Schedule
    is_lock_step: bool = False
    # All ranks use the largest K of any rank; finished ranks go on until all ranks are finished.
    ranks: Ranks = ONE_PROCESS
    # The group uses rank 0's choice. ONE_PROCESS if every rank's schedule chooses the same K.
    group: Ranks = ONE_PROCESS
    # Maximum number of tokens with logits per round, over all rows; None for no limit.
    max_logits: int | None = None

    @classmethod
    def of(cls, plan: Plan, drafter: Drafter) -> "DraftLength":
        """Return the draft length for a planned call."""
        call = plan.call
        reads_clock = plan.config.schedule == "adaptive" and drafter.max_draft_tokens != 0
        group = call.ranks if reads_clock else ONE_PROCESS
        max_logits = max_logits_of(plan) if reads_clock else None
        return cls(make_schedule(plan, drafter), plan.is_lock_step, call.ranks, group, max_logits)

    def begin(self, prefill_s: float, num_read: int) -> None:
        """Prepare the first round after the target's prefill of `num_read` tokens per row."""
        self.schedule.begin(prefill_s, num_read)

    def next(
        self,
        batch: Batch,
        room: Sequence[int],
        proposed: Sequence[Sequence[float]],
        num_unread: int,
        target_room: int | None = None,
    ) -> Choice | None:
        """Return the schedule's choice within the rows' limits; None at the end.

        Args:
            batch: The rows.
            room: [B] maximum number of draft tokens in each row.
            proposed: [B][N] probabilities of each row's proposed tokens.
            num_unread: Number of tokens per row that the drafter must read first.
            target_room: Maximum number of tokens that the target can score in every row. None for
                no limit.
        """
        if target_room is not None:
            target_room = self.ranks.min(target_room)
        num_left = batch.num_left
        live = [row for row, is_finished in enumerate(batch.is_finished) if not is_finished]
        choice = None
        if live:
            limits = [min(num_left[row] - 1, batch.draft_limits[row], room[row]) for row in live]
            if self.is_lock_step:
                max_left = max(num_left[row] for row in live)
                max_tokens = min([max_left - 1, *(batch.draft_limits[row] for row in live)])
                max_tokens = min([max_tokens, *(room[row] for row in live)])
            else:
                max_tokens = max(limits)
            if target_room is not None:
                max_tokens = min(max_tokens, target_room)
            if self.max_logits is not None:
                max_tokens = min(max_tokens, self.max_logits // batch.num_rows - 1)
            rows = [
                RowAhead(batch.row_ids[row], num_left[row], proposed[row][: max(limit, 0)])
                for row, limit in zip(live, limits, strict=True)
            ]
            rows = [slowest(rows)] if self.is_lock_step else rows
            choice = self.schedule.choose(rows, batch.num_rows, max(max_tokens, 0), num_unread)
        return self._agreed(choice)

    def _agreed(self, choice: Choice | None) -> Choice | None:
        """Synchronise the choice across all ranks and return it."""
        if not (self.ranks.is_distributed or self.group.is_distributed):
            return choice
        number = None
        if choice is not None:
            number = choice.num_draft_tokens * _BASE + choice.num_model_tokens
            number = self.group.broadcast_number(number)
        number = self.ranks.max(number)
        return None if number is None else Choice(*divmod(number, _BASE))

    def on_round(self, record: RoundRecord) -> None:
        live, verified = record.live_rows, record.verified
        if not record.num_round or not any(record.is_served[row] for row in live):
            return
        cached = record.draft.cached
        num_model_tokens = record.num_model_tokens
        if cached is not None and not any(cached.is_own):
            num_model_tokens = 0  # all rows have free proposals
        rows = [
            RowOutcome(
                record.row_ids[row],
                verified.num_drafted[row],
                verified.num_accepted[row],
                record.trimmed.num_emitted[row],
                record.is_served[row] and (cached is None or cached.is_own[row]),
            )
            for row in live
        ]
        if self.is_lock_step:
            rows = [
                RowOutcome(
                    rows[0].row_id,
                    min(row.num_drafted for row in rows),
                    min(row.num_accepted for row in rows),
                    min(row.num_emitted for row in rows),
                    any(row.is_model for row in rows),
                )
            ]
        seconds = record.seconds
        self.schedule.update(
            RoundOutcome(
                rows,
                len(record.row_ids),
                record.draft.token_ids.shape[1],
                num_model_tokens,
                record.num_fed,
                seconds.draft,
                seconds.score,
                seconds.verify + seconds.bookkeeping,
            )
        )


def slowest(rows: Sequence[RowAhead]) -> RowAhead:
    """Merge rows in lock step into one row: a token is accepted if all rows accept it."""
    num_left = max(row.num_left for row in rows)
    proposed = [math.prod(column) for column in zip(*(row.proposed for row in rows), strict=False)]
    return RowAhead(rows[0].row_id, num_left, proposed)


def max_logits_of(plan: Plan) -> int:
    """Return how many tokens' float32 logits fill `LOGITS_SHARE` of the target's device memory."""
    target = plan.target
    num_bytes = int(LOGITS_SHARE * memory_bytes(target.device))
    return num_bytes // (vocab_size_of(target.model) * torch.float32.itemsize)


def make_schedule(plan: Plan, drafter: Drafter) -> Schedule:
    """Make the schedule for a planned call within the limits of its drafter."""
    config, max_tokens = plan.config, drafter.max_draft_tokens
    if max_tokens == 0:
        return ConstantSchedule(0)
    if max_tokens is not None and max_tokens < config.max_draft_tokens:
        config = replace(
            config,
            num_assistant_tokens=max_tokens,
            num_assistant_tokens_schedule=config.schedule,
        )
    max_model_tokens = 0 if drafter.is_free else config.max_model_tokens
    match config.schedule:
        case "adaptive":
            memory = memory_of(plan, config)
            if memory.costs.prior.never_pays:
                max_model_tokens = 0
            refills_rows = plan.call.row_lists.rows_leave
            return AdaptiveSchedule(memory, max_model_tokens, refills_rows)
        case "heuristic":
            return HeuristicSchedule(config.first_tokens, max_model_tokens)
        case _:
            return ConstantSchedule(
                config.max_draft_tokens, max_model_tokens, begins_plain=lacks_plain_step(plan)
            )


def memory_of(plan: Plan, config: SpeculationConfig) -> ScheduleMemory:
    """Return the schedule memory from earlier calls of the same type.

    Args:
        plan: The planned call.
        config: Settings of the call, with the drafter's draft length.
    """
    source, target = plan.source, plan.target.model
    key, num_rows = source.history_key(), plan.call.batch_size.bit_length()
    sizes = draft_lens(config, source.varies_len) if plan.runners.parts else None
    call_type = key.name, *call_type_of(plan), config.max_draft_tokens, num_rows
    prior = draft_prior(target, source)
    compiles_sizes = not plan.runners.shares_code(plan.target.device)

    def make_memory() -> ScheduleMemory:
        return ScheduleMemory(prior, config.max_draft_tokens, sizes, compiles_sizes=compiles_sizes)

    return MemoryStore.of(target).get(key.draft, call_type, make_memory)
