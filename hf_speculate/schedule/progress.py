"""The progress of a call in plain steps: how many its rounds have replaced, and how many rows each would have had."""

from hf_speculate.schedule.base import RoundOutcome


class Progress:
    """Counts plain steps by the live row that is furthest behind.

    Plain decoding adds a token to every live row in a step, so it needs as many steps as that row has tokens. A step
    has the rows that are live now, and those that ended at or after its token. A row that joins counts from the row
    that is furthest behind then.
    """

    def __init__(self) -> None:
        self._num_steps = 0  # that were replaced so far: the tokens of the live row that is furthest behind
        self._lens: dict[int, int] = {}  # tokens of each live row
        self._ended: dict[int, int] = {}  # tokens of each row that has ended ahead of a live one

    @property
    def num_ahead(self) -> int:
        """Tokens of all rows past the last step that was replaced."""
        lens = [*self._lens.values(), *self._ended.values()]
        return sum(lens) - self._num_steps * len(lens)

    def advance(self, outcome: RoundOutcome) -> list[int]:
        """The number of rows of each plain step that a round has replaced; at least one step."""
        num_left = outcome.num_left or [1] * len(outcome.row_ids)
        num_emitted = outcome.num_emitted or [num + 1 for num in outcome.num_accepted]
        before, self._lens, start = {**self._ended, **self._lens}, {}, self._num_steps
        self._ended = {}
        for row_id, emitted, left in zip(outcome.row_ids, num_emitted, num_left, strict=True):
            rows = self._lens if left > 0 else self._ended
            rows[row_id] = before.pop(row_id, start) + emitted
        self._ended |= before  # those that had ended, and rows that were cancelled
        live, ended = self._lens.values(), self._ended.values()
        end = self._num_steps = max(min(live) if live else max(ended, default=0), start + 1)
        if not ended:
            return [max(len(live), outcome.num_rows)] * (end - start)
        num_live = [len(live) + sum(length >= step for length in ended) for step in range(start + 1, end + 1)]
        self._ended = {row_id: length for row_id, length in self._ended.items() if length > end}
        return [max(num, outcome.num_rows) for num in num_live]  # finished rows that stay are in plain steps too
