"""The progress of a call in plain steps: how many its rounds have replaced, and how many rows each would have had."""

from collections.abc import Sequence


class Progress:
    """Counts plain steps by the live row that is furthest behind.

    Plain decoding adds a token to every live row in a step, so it needs as many steps as that row has tokens. A step
    has the rows that are live now, and those that ended at or after its token. A row that joins counts from the row
    that is furthest behind then.

    Args:
        keeps_rows: whether a step has all rows of the batch: ended ones stay, or all advance in lock step.
    """

    def __init__(self, keeps_rows: bool = False) -> None:
        self._keeps_rows = keeps_rows
        self._num_steps = 0  # that were replaced so far: the tokens of the live row that is furthest behind
        self._lens: dict[int, int] = {}  # tokens of each live row
        self._ended: dict[int, int] = {}  # tokens of each row that has ended ahead of a live one

    @property
    def num_ahead(self) -> int:
        """Tokens of all rows past the last step that was replaced."""
        lens = [*self._lens.values(), *self._ended.values()]
        return sum(lens) - self._num_steps * len(lens)

    def advance(
        self, row_ids: Sequence[int], num_emitted: Sequence[int], num_left: Sequence[int], num_rows: int
    ) -> list[int]:
        """The number of rows of each plain step that a round has replaced; at least one step.

        Args:
            row_ids: [N] rows that were live.
            num_emitted: [N] tokens that each of them gained.
            num_left: [N] tokens that each may still emit, 0 if it has ended.
            num_rows: B of the round.
        """
        before, self._lens, start = {**self._ended, **self._lens}, {}, self._num_steps
        self._ended = {}
        for row_id, emitted, left in zip(row_ids, num_emitted, num_left, strict=True):
            rows = self._lens if left > 0 else self._ended
            rows[row_id] = before.pop(row_id, start) + emitted
        self._ended |= before  # those that had ended, and rows that were cancelled
        live, ended = self._lens.values(), self._ended.values()
        end = self._num_steps = max(min(live) if live else max(ended, default=0), start + 1)
        if self._keeps_rows:
            return [max(len(live), num_rows)] * (end - start)
        num_live = [len(live) + sum(length >= step for length in ended) for step in range(start + 1, end + 1)]
        self._ended = {row_id: length for row_id, length in self._ended.items() if length > end}
        return num_live
