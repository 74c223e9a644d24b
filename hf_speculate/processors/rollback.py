"""What a logits processor with state must be able to do to run inside a speculative block."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class RollbackProcessor(Protocol):
    """A row-wise logits processor whose state follows the text and can take its last calls back.

    Such a processor runs at all K+1 positions of a round, and on the draft model, so that drafts obey it; rows need not
    move in lock step. Any class with these four methods is one; under plain `generate()` only `__call__` is used,
    in lock step `fork` too. Each call shows every row one token more than the row's call before did:

    - the first call of all shows the prompts, as plain `generate()` does;
    - a round's first call shows each row's newest token, the next K calls its drafted ones, from left to right;
    - `rollback` follows the round and takes back the calls whose newest token was refused. It never asks for more calls
      than there were since the last `rollback`, so nothing older need be kept;
    - before each draft, `fork` gives the draft model a copy of its own, which is thrown away after it.

    A round may show a row a token that the processor has just forbidden, and after it, as after a drafted EOS, ids
    without a meaning; what is returned there is never read, and is taken back. So no call may fail for what it is
    shown, and each counts as one.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process the scores of the token that comes next in each row.

        Args:
            input_ids: [B, n] int64, each row ending in the last column. Rows of different lengths are made equally long
                by repeating their first id in front, which is padding where there is any.
            scores: [B, V] float32, free to be written to; a fork may be shown another V, its draft model's.

        Returns:
            [B, V] float32.
        """

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Take back each row's last calls.

        Args:
            num_calls: [B] calls of each row, 0 or more.
        """

    def rows(self, indices: Sequence[int]) -> None:
        """Forget all rows but `indices`, in that order; finished rows leave the batch in this way."""

    def fork(self) -> "RollbackProcessor":
        """A copy that stands where this one stands and goes on by itself; it is never rolled back."""


class ForkedProcessor:
    """Stands among a draft model's processors for one of the target's with state, which is rolled back there."""

    def __init__(self, processor: RollbackProcessor):
        self.fork = processor.fork

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.fork()(input_ids, scores)

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Does nothing."""

    def rows(self, indices: Sequence[int]) -> None:
        """Does nothing."""
