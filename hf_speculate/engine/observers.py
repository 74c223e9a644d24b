"""Observers: record, report and stream each round."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_speculate.engine.plan import Plan, call_type_of
from hf_speculate.engine.stage_clock import Stage
from hf_speculate.engine.stop_tracker import StopTracker
from hf_speculate.errors import BadLogitsError
from hf_speculate.model_state import model_state
from hf_speculate.stats import ENOUGH_PLAIN_STEPS, SpeculationStats
from hf_speculate.types import BAD_LOGITS, RoundRecord, RoundReport, StageSeconds
from hf_speculate.verify.base import depends_on_draft

_MAX_CALL_TYPES = 64


class Observer:
    """Reader of every round's record.

    It runs after the batch and the caches have been updated.
    """

    stage: Stage
    """Stage to name in errors raised by the observer."""

    def on_round(self, record: RoundRecord) -> None:
        """Read the record of a round; the first token after the prompt is round 0."""

    def on_end(self, num_new_tokens: int, seconds: StageSeconds) -> None:
        """Finish after the last round.

        Args:
            num_new_tokens: Number of new tokens in the longest row.
            seconds: Seconds since the last record.
        """


class ReplacedSteps:
    """Counter of the plain steps that rounds replace.

    A step of plain decoding adds one token to every live row, so the slowest live row determines
    the number of steps. A step includes the live rows and the rows that got their last token at or
    after this step. A joining row starts at the step count of the slowest row at that time.

    Args:
        keeps_rows: Whether a step includes all rows of the batch, because finished rows stay or all
            rows advance in lock step.
    """

    def __init__(self, keeps_rows: bool = False) -> None:
        self._keeps_rows = keeps_rows
        self._num_steps = 0  # replaced steps: number of tokens in the slowest live row
        self._lens: dict[int, int] = {}  # number of tokens in each live row
        self._ended: dict[int, int] = {}  # the same for each row that ended ahead of a live row

    def advance(
        self,
        row_ids: Sequence[int],
        num_emitted: Sequence[int],
        num_left: Sequence[int],
        num_rows: int,
    ) -> list[int]:
        """Return the number of rows in each plain step that a round replaces; at least one step.

        Args:
            row_ids: [N] live rows.
            num_emitted: [N] number of new tokens in each row.
            num_left: [N] number of remaining tokens in each row, 0 if it has ended.
            num_rows: Batch size B of the round.
        """
        before, self._lens, start = {**self._ended, **self._lens}, {}, self._num_steps
        self._ended = {}
        for row_id, emitted, left in zip(row_ids, num_emitted, num_left, strict=True):
            rows = self._lens if left > 0 else self._ended
            rows[row_id] = before.pop(row_id, start) + emitted
        self._ended |= before  # rows that ended before, and cancelled rows
        live, ended = self._lens.values(), self._ended.values()
        end = self._num_steps = max(min(live) if live else max(ended, default=0), start + 1)
        if self._keeps_rows:
            return [max(len(live), num_rows)] * (end - start)
        num_live = [
            len(live) + sum(length >= step for length in ended)
            for step in range(start + 1, end + 1)
        ]
        self._ended = {row_id: length for row_id, length in self._ended.items() if length > end}
        return num_live


class PlainSteps:
    """Durations in seconds of the newest plain steps of one target.

    They are stored by call type and number of rows.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_type: dict[Hashable, dict[int, deque[float]]] = {}

    @classmethod
    def of(cls, model: nn.Module) -> "PlainSteps":
        """Return the plain steps of a target."""
        return model_state(model).get(cls, cls)

    def get(self, call_type: Hashable) -> dict[int, list[float]]:
        """Return a copy of the durations for a call type by number of rows, newest last."""
        with self._lock:
            return {
                num_rows: list(seconds)
                for num_rows, seconds in self._by_type.get(call_type, {}).items()
            }

    def add(self, call_type: Hashable, steps: Mapping[int, Sequence[float]]) -> None:
        """Add the steps of a call; above 64 call types, drop the least recently updated one."""
        with self._lock:
            by_rows = self._by_type.pop(call_type, {})  # the newest type comes last
            for num_rows, seconds in steps.items():
                by_rows.setdefault(num_rows, deque(maxlen=ENOUGH_PLAIN_STEPS)).extend(seconds)
            self._by_type[call_type] = by_rows
            if len(self._by_type) > _MAX_CALL_TYPES:
                del self._by_type[next(iter(self._by_type))]


def has_plain_steps(plan: Plan) -> bool:
    """Return whether a round without drafts is a plain step.

    The result is False if forwards are compiled or captured for a single length.
    """
    return "target" not in plan.runners.parts or plan.config.schedule != "constant"


def lacks_plain_step(plan: Plan) -> bool:
    """Return whether a call with a constant draft length needs to measure a plain step.

    The result is True if no plain step is known and measuring one does not change the output.
    Several ranks measure no step because their measurements differ. Continuous batching measures
    no step either.
    """
    call = plan.call
    if depends_on_draft(plan.config) or not has_plain_steps(plan):
        return False
    if call.ranks.is_distributed or call.row_lists.rows_leave:
        return False
    return call.batch_size not in PlainSteps.of(plan.target.model).get(call_type_of(plan))


@dataclass
class StatsObserver(Observer):
    """Observer that updates the statistics of a call.

    At the end, it adds the plain steps of the call to the target's.
    """

    stage = Stage.RECORD
    stats: SpeculationStats
    num_user_host_syncs: int = 0  # possible host syncs in user code per round
    counts_rows: bool = True  # whether to count each output row as well
    keeps_rows: bool = False  # whether plain steps include the whole batch, even finished rows
    counts_plain_steps: bool = True  # whether a round without drafts is a plain step
    # called with the plain steps at the end; None to drop them
    remember: Callable[[Mapping[int, Sequence[float]]], None] | None = None

    def __post_init__(self) -> None:
        self._progress = ReplacedSteps(self.keeps_rows)
        # minimum seconds of rounds with drafts by number of rows, without the drafting time
        self._fastest_s: dict[int, float] = {}

    @classmethod
    def of(cls, plan: Plan, stats: SpeculationStats) -> "StatsObserver":
        """Make the observer for a planned call; add the plain steps of earlier calls to `stats`."""
        call_type, steps = call_type_of(plan), PlainSteps.of(plan.target.model)
        stats.earlier_plain_step_s_by_rows = steps.get(call_type)
        return cls(
            stats,
            int(plan.call.streamer is not None),
            keeps_rows=plan.steps_have_all_rows,
            counts_plain_steps=has_plain_steps(plan),
            remember=partial(steps.add, call_type),
        )

    def on_round(self, record: RoundRecord) -> None:
        stats, verified = self.stats, record.verified
        stats.add_seconds(record.seconds)
        if record.num_round:
            stats.rounds_s += sum(record.seconds)
        elif not stats.time_to_first_token_s:  # a call may decode in several runs
            stats.time_to_first_token_s = record.call_s
        if not any(record.was_live):
            return
        stats.status |= verified.status
        stats.num_host_syncs += verified.num_host_syncs
        stats.num_user_host_syncs += verified.num_user_host_syncs + self.num_user_host_syncs
        if not record.num_round:
            return
        draft_len, num_rows = record.draft.token_ids.shape[1], len(record.row_ids)
        stats.num_batch_rounds += 1
        stats.num_rescored += verified.is_rescored
        stats.add_draft_len(draft_len)
        if draft_len:
            seconds = sum(record.seconds) - record.seconds.draft
            self._fastest_s[num_rows] = min(seconds, self._fastest_s.get(num_rows, seconds))
        elif self.counts_plain_steps:
            stats.add_plain_step(sum(record.seconds), num_rows)
        self._count_replaced_steps(record)
        for row in record.live_rows:
            num_emitted, num_drafted = record.trimmed.num_emitted[row], verified.num_drafted[row]
            # a criterion may stop the row before its last accepted token
            num_accepted = min(verified.num_accepted[row], num_emitted)
            num_verified = min(
                verified.num_accepted[row] + 1, num_emitted, num_drafted, len(verified.new_ids[row])
            )
            stats.add_row(num_drafted, num_accepted, num_emitted, num_verified)
            if self.counts_rows:
                stats.add_to_row(record.row_ids[row], num_drafted, num_accepted)

    def _count_replaced_steps(self, record: RoundRecord) -> None:
        """Count the plain steps that a round replaces, by number of rows."""
        live, trimmed = record.live_rows, record.trimmed
        num_left = [0 if trimmed.is_stopped[row] else record.num_left[row] for row in live]
        num_emitted = [trimmed.num_emitted[row] for row in live]
        row_ids = [record.row_ids[row] for row in live]
        for num_rows in self._progress.advance(row_ids, num_emitted, num_left, len(record.row_ids)):
            self.stats.replaced_steps[num_rows] = self.stats.replaced_steps.get(num_rows, 0) + 1

    def on_end(self, num_new_tokens: int, seconds: StageSeconds) -> None:
        self.stats.add_seconds(seconds)
        self.stats.num_longest += num_new_tokens - 1
        steps = self.stats.plain_step_s_by_rows
        for num_rows, steps_s in steps.items():
            if len(steps_s) == 1:  # this may be the first forward of its size, which is slower
                steps_s[0] = min(steps_s[0], self._fastest_s.get(num_rows, steps_s[0]))
        if self.remember is not None:
            self.remember(steps)


def bad_logits_errors(record: RoundRecord) -> Iterator[tuple[int, BadLogitsError]]:
    """Yield each row whose last token was sampled from invalid logits, with the error."""
    for row in record.live_rows if record.verified.status & BAD_LOGITS else ():
        num_emitted = record.trimmed.num_emitted[row]
        if not num_emitted or num_emitted < len(record.verified.new_ids[row]):
            continue
        scores = record.verified.scores[row, num_emitted - 1]  # [V]
        faults = {
            "NaN": scores.isnan().any(),
            "+inf": scores.isposinf().any(),
            "-inf for every token": scores.isneginf().all(),
        }
        fault = next((fault for fault, holds in faults.items() if holds), None)
        if fault is not None:
            error = (
                f"logits must be finite or -inf, and not all -inf, to draw a token, got {fault} in "
                "row "
                f"{record.row_ids[row]} after {record.trimmed.num_new[row] - 1} new tokens; look "
                "for overflow in the "
                "model or a processor that forbids every token, or pass remove_invalid_values=True"
            )
            yield row, BadLogitsError(error)


@dataclass
class BadLogitsObserver(Observer):
    """Observer that checks for invalid logits.

    It raises an error for a token sampled from logits that define no distribution, as plain
    `generate` does.
    """

    stage = Stage.VERIFY
    stops: StopTracker
    # Errors past a row's stop, with the number of tokens before each. Plain `generate` may stop
    # before them.
    _late: list[tuple[int, BadLogitsError]] = field(default_factory=list, init=False)

    def on_round(self, record: RoundRecord) -> None:
        for row, error in bad_logits_errors(record):
            stop, num_new = self.stops.stop_lens[row], record.trimmed.num_new[row] - 1
            if stop is None or num_new < stop:
                raise error
            self._late.append((num_new, error))

    def on_end(self, num_new_tokens: int, seconds: StageSeconds) -> None:
        for num_new, error in self._late:
            if num_new < num_new_tokens:
                raise error


@dataclass
class StreamObserver(Observer):
    """Observer that passes the new tokens of a single row to the streamer, one by one."""

    stage = Stage.EMIT
    streamer: Any

    def on_round(self, record: RoundRecord) -> None:
        for token_id in record.verified.new_ids[0][: record.trimmed.num_emitted[0]]:
            self.streamer.put(torch.tensor([token_id], device="cpu"))


@dataclass
class CallbackObserver(Observer):
    """Observer that calls `speculation_callback` with a `RoundReport` after every round."""

    stage = Stage.REPORT
    callback: Callable[[RoundReport], object]

    def on_round(self, record: RoundRecord) -> None:
        live = record.live_rows
        if not record.num_round or not live:
            return
        seconds = record.seconds
        self.callback(
            RoundReport(
                num_round=record.num_round,
                row_ids=tuple(record.row_ids[row] for row in live),
                num_drafted=tuple(record.verified.num_drafted[row] for row in live),
                num_accepted=tuple(record.verified.num_accepted[row] for row in live),
                num_emitted=tuple(record.trimmed.num_emitted[row] for row in live),
                draft_s=seconds.draft,
                score_s=seconds.score,
                other_s=seconds.verify + seconds.bookkeeping,
                total_s=record.total_s,
                drafted_by=tuple(map(record.drafted_by, live)),
            )
        )


def make_observers(plan: Plan, stats: SpeculationStats, stops: StopTracker) -> list[Observer]:
    """Make the observers for a planned call, without the observers in the decoder's fields."""
    call = plan.call
    observers: list[Observer] = [BadLogitsObserver(stops)] if call.do_sample else []
    observers.append(StatsObserver.of(plan, stats))
    if plan.config.speculation_callback is not None:  # called before the tokens are streamed
        observers.append(CallbackObserver(plan.config.speculation_callback))
    if call.streamer is not None:
        observers.append(StreamObserver(call.streamer))
    return observers
