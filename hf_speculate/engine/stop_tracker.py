"""Stop tracker: find the end of each row and the rows that are finished."""

from dataclasses import InitVar, dataclass

from hf_speculate.engine.batch import Batch
from hf_speculate.engine.plan import Plan
from hf_speculate.processors.of_rows import RowCriteria
from hf_speculate.rows.per_row import PerRow
from hf_speculate.types import Trimmed, Verified


@dataclass
class StopTracker(PerRow):
    """Tracks where each row stops.

    It trims each round to the output of token-by-token decoding.
    """

    BY_ROW = ("num_new", "stop_lens")
    PARTS = ("stopping",)

    stopping: RowCriteria
    num_rows: InitVar[int]
    max_new_tokens: int
    # False without an EOS token, in which case rows continue until the last row has stopped
    pads_ended_rows: bool
    is_lock_step: bool

    def __post_init__(self, num_rows: int) -> None:
        self.num_new = [0] * num_rows  # number of emitted tokens in each row
        # number of emitted tokens up to the stop of each row; None before the stop
        self.stop_lens: list[int | None] = [None] * num_rows
        self.end = 0  # the largest stop, including the stops of rows that have left the batch

    @classmethod
    def of(cls, plan: Plan) -> "StopTracker":
        """Return the stop tracker for a planned call."""
        call, num_rows = plan.call, plan.call.batch_size
        criteria = call.ranks.wrap_criteria(call.criteria)
        stopping = call.row_lists.criteria(criteria, num_rows, call.max_length)
        return cls(stopping, num_rows, call.max_new_tokens, plan.pads_ended_rows, plan.is_lock_step)

    def trim(self, batch: Batch, verified: Verified) -> Trimmed:
        """Trim the verified tokens to the emitted tokens, and find the finished rows."""
        if verified.is_stopped is None:
            counts, is_stopped = self.stopping(batch.host_tokens, verified.new_ids)
        else:  # the criteria already ran between positions
            counts, is_stopped = [len(ids) for ids in verified.new_ids], verified.is_stopped
        goes_on = not self.pads_ended_rows or self.is_lock_step
        num_emitted = []
        for row, (count, stops) in enumerate(zip(counts, is_stopped, strict=True)):
            if stops and self.stop_lens[row] is None:
                self.stop_lens[row] = stop = self.num_new[row] + count
                self.end = max(self.end, stop)
            if batch.is_finished[row] and not self.is_lock_step:
                count = 0
            elif goes_on:
                count = len(verified.new_ids[row])
            num_emitted.append(count)
        self.num_new = [
            before + count for before, count in zip(self.num_new, num_emitted, strict=True)
        ]
        return Trimmed(num_emitted, is_stopped, self._is_finished(), self.num_new)

    def surplus(self) -> list[int]:
        """Return each row's number of emitted tokens past the end of the output, [B]."""
        return [max(num_new - self.end, 0) for num_new in self.num_new]

    def _is_finished(self) -> list[bool]:
        has_stopped = [stop is not None for stop in self.stop_lens]
        if self.pads_ended_rows:
            return has_stopped
        end = min(self.max_new_tokens, self.end) if all(has_stopped) else self.max_new_tokens
        return [num_new >= end for num_new in self.num_new]
