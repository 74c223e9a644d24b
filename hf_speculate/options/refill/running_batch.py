"""A running batch, which rows join after their prefill and leave one by one."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_speculate.engine.batch import Batch
from hf_speculate.engine.decoder import SpeculativeDecoder
from hf_speculate.engine.observers import Observer, StatsObserver, bad_logits_errors
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.errors import BadLogitsError
from hf_speculate.processors.registry import Reads, find_reads
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import RoundRecord


class FinishedRow(NamedTuple):
    """A row that has left the running batch."""

    row_id: int
    token_ids: list[int]  # new tokens
    num_rounds: int
    num_drafted: int
    num_accepted: int
    error: Exception | None  # the error that ended the row; None if it did not fail


class RunningBatch:
    """Rows of several calls decoded together.

    Each row gets the same tokens as it would get on its own.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,  # the first rows' decoder
        batch: Batch,
        stats: SpeculationStats,
        clock: StageClock,
        observer: Observer,
    ):
        self._batch = batch
        self._rows = _RowObserver(decoder.plan.call.do_sample)
        observers = [
            StatsObserver(stats, counts_rows=False),
            self._rows,
            decoder.output,
            decoder.draft_length,
            observer,
        ]
        self._decoder = replace(decoder, observers=observers, clock=clock)
        self._decoder.drafts.faults.stats = stats

    @property
    def row_ids(self) -> list[int]:
        rows = zip(self._batch.row_ids, self._batch.is_finished, strict=True)
        return [row_id for row_id, is_finished in rows if not is_finished]

    def join(self, theirs: SpeculativeDecoder, batch: Batch) -> None:
        """Add rows after their prefill; their decoder must not be used afterwards."""
        mine = self._decoder
        mine.drafts.admit(theirs.drafts, self._batch)  # reads the rows already in the batch
        mine.target.join(theirs.target)
        mine.verification.join(theirs.verification)
        mine.stops.join(theirs.stops)
        mine.output.join(theirs.output)
        self._batch.join(batch)

    def decode_round(self) -> list[FinishedRow]:
        """Decode one round; return the finished rows."""
        before = self.row_ids
        self._decoder.decode_round(self._batch)
        if self._rows.errors:
            self._end(self._rows.errors)
        self._decoder.clock.enter(None)
        left = set(self.row_ids)
        return [self._finished(row_id) for row_id in before if row_id not in left]

    def new_ids(self, row_id: int) -> list[int]:
        """Return the new tokens of a row, without copying them."""
        return self._decoder.output.new_ids[row_id]

    def cancel(self, row_ids: Sequence[int]) -> list[FinishedRow]:
        self._end(row_ids)
        return [self._finished(row_id) for row_id in row_ids]

    def _end(self, row_ids: Collection[int]) -> None:
        self._batch.end_rows(row_ids)
        self._decoder.drop_finished_rows(self._batch)

    def _finished(self, row_id: int) -> FinishedRow:
        num_rounds, num_drafted, num_accepted = self._rows.counts.pop(row_id, [0, 0, 0])
        error = self._rows.errors.pop(row_id, None)
        token_ids = self._decoder.output.take(row_id)
        token_ids = token_ids if error is None else token_ids[:-1]
        return FinishedRow(row_id, token_ids, num_rounds, num_drafted, num_accepted, error)


class _RowObserver(Observer):
    """Observer of rows.

    It counts each row's rounds. When sampling, it collects an error for each row whose logits
    define no distribution.
    """

    stage = Stage.RECORD

    def __init__(self, samples: bool):
        self._samples = samples
        # rounds, drafted, accepted tokens
        self.counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        self.errors: dict[int, BadLogitsError] = {}

    def on_round(self, record: RoundRecord) -> None:
        verified = record.verified
        for row in record.live_rows:
            counts = self.counts[record.row_ids[row]]
            counts[0] += 1
            counts[1] += verified.num_drafted[row]
            counts[2] += min(verified.num_accepted[row], record.trimmed.num_emitted[row])
        for row, error in bad_logits_errors(record) if self._samples else ():
            self.errors[record.row_ids[row]] = error


def join_obstacle(decoder: SpeculativeDecoder) -> str:
    """Return why rows of a call cannot join a running batch; empty if they can."""
    plan, call = decoder.plan, decoder.plan.call
    if plan.is_lock_step:
        return plan.lock_step
    if plan.compiled:
        return f"compiled forwards ({', '.join(plan.compiled)}) have a fixed number of rows"
    for part, kv_cache in (("target", decoder.target.kv_cache), ("draft", decoder.drafts.kv_cache)):
        if kv_cache is not None and kv_cache.join_obstacle:
            return (
                f"rows cannot join the {kv_cache.kind} cache of the {part} model: "
                f"{kv_cache.join_obstacle}"
            )
    if not (call.target_inputs.is_empty and call.draft_inputs.is_empty):
        return "the models read more than tokens"
    if any(find_reads(processor) is Reads.HISTORY for processor in call.processors):
        return "a logits processor has state"
    if not decoder.drafts.can_join:
        return "the drafter has states that cannot be joined"
    if call.binds_rows:
        return "hooks of the target may hold an adapter or a vector for each row"
    if plan.keeps_rows or call.ranks.is_distributed or plan.config.relax_only_inside is not None:
        return "the call depends on its rows staying together"
    return ""
