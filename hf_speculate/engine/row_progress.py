"""Row progress: how far a drafter is in one row, and what its KV cache keeps of it."""

from typing import NamedTuple


class RowProgress(NamedTuple):
    """How far the drafter is in one row, counted in columns from the row's start.

    After a round the drafter is left equally far behind in every row: the next query has Q tokens of each, and the
    cache drops what it holds of them. Where a row has too few tokens for that, it keeps more:

    | row                                       | the cache keeps                                    |
    |-------------------------------------------|----------------------------------------------------|
    | live                                      | all but the last Q tokens                          |
    | finished, with fewer than Q new tokens    | its prompt, after which tokens are fed again       |
    | with fewer than Q tokens behind its pads  | its padding, some of which is then read as text    |
    """

    length: int  # columns of the row
    num_seen: int  # what the drafter has read, drafts of its own among them
    prompt_len: int
    is_finished: bool

    def num_valid(self, num_emitted: int, is_own: bool) -> int:
        """What the drafter has read and the row holds; of the emitted tokens, which may not be its own, all or none."""
        return min(self.num_seen, self.length if is_own else self.length - num_emitted)

    def num_kept(self, num_query: int) -> int:
        """Columns that the cache keeps before a query, padding ignored."""
        kept = self.length - num_query
        return max(kept, min(self.num_seen, self.prompt_len)) if self.is_finished else kept

    def num_kept_with_padding(self, num_query: int, num_real: int) -> int:
        """What it keeps if it holds `num_real` tokens besides padding."""
        return max(self.num_kept(num_query), self.num_seen - num_real)
