"""Stop tracker: where each row stops, and which rows are finished."""

from collections.abc import Callable, Sequence

from hf_speculate.cache.token_buffer import TokenBuffer
from hf_speculate.engine.batch import Batch
from hf_speculate.processors.row_groups import StoppingGroups
from hf_speculate.processors.stopping_criteria import StopVerdict
from hf_speculate.types import Trimmed, Verified

BlockStopping = Callable[[TokenBuffer, Sequence[list[int]]], StopVerdict]
"""Stopping criteria on blocks of new tokens, such as `BlockStoppingCriteria`."""


class StopTracker:
    """Trims each round to the tokens that token-by-token decoding would have emitted.

    A row that stops is finished if ended rows are filled with padding. Without an EOS token, rows go on decoding until
    the last one has stopped, as in plain `generate`; the surplus is dropped at the end of the call.
    """

    def __init__(
        self,
        stopping: BlockStopping,
        row_ids: Sequence[int],
        max_new_tokens: int,
        pads_ended_rows: bool,
        is_lock_step: bool,
    ):
        self.num_new = dict.fromkeys(row_ids, 0)  # tokens that an output row has emitted
        self.stop_lens: dict[int, int | None] = dict.fromkeys(row_ids)  # the same where it stopped, or None
        self._stopping = stopping
        self._max_new_tokens = max_new_tokens
        self._pads_ended_rows = pads_ended_rows
        self._is_lock_step = is_lock_step

    def trim(self, batch: Batch, verified: Verified) -> Trimmed:
        """How many verified tokens each row emits, and which rows are finished after them."""
        if verified.is_stopped is None:
            counts, is_stopped = self._stopping(batch.host_tokens, verified.new_ids)
        else:  # the criteria ran between positions
            counts, is_stopped = [len(ids) for ids in verified.new_ids], verified.is_stopped
        goes_on = not self._pads_ended_rows or self._is_lock_step
        num_emitted = []
        for row, (num, stops) in enumerate(zip(counts, is_stopped, strict=True)):
            row_id = batch.row_ids[row]
            if stops and self.stop_lens[row_id] is None:
                self.stop_lens[row_id] = self.num_new[row_id] + num
            if batch.is_finished[row] and not self._is_lock_step:
                num = 0
            elif goes_on:
                num = len(verified.new_ids[row])
            self.num_new[row_id] += num
            num_emitted.append(num)
        return Trimmed(num_emitted, is_stopped, self._finished(batch.row_ids))

    def rows(self, indices: Sequence[int], row_ids: Sequence[int]) -> None:
        """Keep the rows `indices` of those with output rows `row_ids`; the others are forgotten if that is safe."""
        if isinstance(self._stopping, StoppingGroups):  # else the end of the call depends on all rows
            kept = [row_ids[row] for row in indices]
            self.num_new = {row_id: self.num_new[row_id] for row_id in kept}
            self.stop_lens = {row_id: self.stop_lens[row_id] for row_id in kept}
            self._stopping.rows(indices)

    def join(self, other: "StopTracker") -> None:
        """Add the rows of `other`, whose criteria are `StoppingGroups` too, behind these."""
        self.num_new |= other.num_new
        self.stop_lens |= other.stop_lens
        if isinstance(self._stopping, StoppingGroups) and isinstance(other._stopping, StoppingGroups):
            self._stopping.join(other._stopping)

    def end(self) -> int:
        """The number of new tokens of the longest row, once all rows are finished."""
        return max(stop for stop in self.stop_lens.values() if stop is not None)

    def surplus(self, row_ids: Sequence[int]) -> list[int]:
        """Tokens that rows have emitted past the end of the output."""
        end = self.end()
        return [max(self.num_new[row_id] - end, 0) for row_id in row_ids]

    def _finished(self, row_ids: Sequence[int]) -> list[bool]:
        if self._pads_ended_rows:
            return [self.stop_lens[row_id] is not None for row_id in row_ids]
        stops = [stop for stop in self.stop_lens.values() if stop is not None]
        end = self._max_new_tokens
        if len(stops) == len(self.stop_lens):
            end = min(end, max(stops))  # rows go on until the last one has stopped
        return [self.num_new[row_id] >= end for row_id in row_ids]
