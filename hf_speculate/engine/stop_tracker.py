"""Stop tracker: where each row stops, and which rows are finished."""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass

from hf_speculate.cache.token_buffer import TokenBuffer
from hf_speculate.engine.batch import Batch
from hf_speculate.processors.row_groups import StoppingGroups
from hf_speculate.processors.stopping_criteria import StopVerdict
from hf_speculate.types import Trimmed, Verified

BlockStopping = Callable[[TokenBuffer, Sequence[list[int]]], StopVerdict]
"""Stopping criteria on blocks of new tokens, such as `BlockStoppingCriteria`."""


@dataclass
class StopTracker:
    """Trims each round to the tokens that token-by-token decoding would have emitted.

    A row that stops is finished if ended rows are filled with padding. Without an EOS token, rows go on decoding until
    the last one has stopped, as in plain `generate`; the surplus is dropped at the end of the call.
    """

    stopping: BlockStopping
    row_ids: InitVar[Sequence[int]]
    max_new_tokens: int
    pads_ended_rows: bool
    is_lock_step: bool

    def __post_init__(self, row_ids: Sequence[int]) -> None:
        self._num_new = dict.fromkeys(row_ids, 0)  # by output row
        self._stop_lens: dict[int, int | None] = dict.fromkeys(row_ids)  # new tokens at which an output row stopped

    def trim(self, batch: Batch, verified: Verified) -> Trimmed:
        """How many verified tokens each row emits, and which rows are finished after them."""
        if verified.is_stopped is None:
            counts, is_stopped = self.stopping(batch.host_tokens, verified.new_ids)
        else:  # the criteria ran between positions
            counts, is_stopped = [len(ids) for ids in verified.new_ids], verified.is_stopped
        goes_on = not self.pads_ended_rows or self.is_lock_step
        num_emitted = []
        for row, (num, stops) in enumerate(zip(counts, is_stopped, strict=True)):
            row_id = batch.row_ids[row]
            if stops and self._stop_lens[row_id] is None:
                self._stop_lens[row_id] = self._num_new[row_id] + num
            if batch.is_finished[row] and not self.is_lock_step:
                num = 0
            elif goes_on:
                num = len(verified.new_ids[row])
            self._num_new[row_id] += num
            num_emitted.append(num)
        return Trimmed(num_emitted, is_stopped, self._finished(batch.row_ids))

    def rows(self, indices: Sequence[int], row_ids: Sequence[int]) -> None:
        """Keep the rows `indices` of those with output rows `row_ids`; the others are forgotten if that is safe."""
        if isinstance(self.stopping, StoppingGroups):  # else the end of the call depends on all rows
            kept = [row_ids[row] for row in indices]
            self._num_new = {row_id: self._num_new[row_id] for row_id in kept}
            self._stop_lens = {row_id: self._stop_lens[row_id] for row_id in kept}
            self.stopping.rows(indices)

    def join(self, other: "StopTracker") -> None:
        """Add the rows of `other`, whose criteria are `StoppingGroups` too, behind these."""
        self._num_new |= other._num_new
        self._stop_lens |= other._stop_lens
        if isinstance(self.stopping, StoppingGroups) and isinstance(other.stopping, StoppingGroups):
            self.stopping.join(other.stopping)

    def stop_len(self, row_id: int) -> int | None:
        """The number of new tokens at which an output row stopped; None if it has not."""
        return self._stop_lens[row_id]

    def end(self) -> int:
        """The number of new tokens of the longest row, once all rows are finished."""
        return max(stop for stop in self._stop_lens.values() if stop is not None)

    def surplus(self, row_ids: Sequence[int]) -> list[int]:
        """Tokens that rows have emitted past the end of the output."""
        end = self.end()
        return [max(self._num_new[row_id] - end, 0) for row_id in row_ids]

    def _finished(self, row_ids: Sequence[int]) -> list[bool]:
        if self.pads_ended_rows:
            return [self._stop_lens[row_id] is not None for row_id in row_ids]
        stops = [stop for stop in self._stop_lens.values() if stop is not None]
        end = self.max_new_tokens
        if len(stops) == len(self._stop_lens):
            end = min(end, max(stops))  # rows go on until the last one has stopped
        return [self._num_new[row_id] >= end for row_id in row_ids]
