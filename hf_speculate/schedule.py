"""How many tokens to draft in the next round."""

from collections.abc import Sequence
from typing import Protocol

from hf_speculate.config import MAX_ASSISTANT_TOKENS


class Schedule(Protocol):
    """Decides the draft's length; its state lives for one call."""

    @property
    def num_draft_tokens(self) -> int:
        """Tokens to draft next, >= 0."""

    def update(self, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Learn from a round.

        Args:
            num_drafted: [B] drafted tokens of each live row.
            num_accepted: [B] those that the verifier kept.
        """


class ConstantSchedule:
    """Always the same number; 0 decodes token by token."""

    def __init__(self, num_draft_tokens: int):
        self._num = num_draft_tokens

    @property
    def num_draft_tokens(self) -> int:
        """The K it was made with."""
        return self._num

    def update(self, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Nothing to learn."""


class HeuristicSchedule:
    """transformers' rule: two more after a wholly accepted draft, one less after a refusal.

    A batch counts as wholly accepted when at least half of its rows were. transformers carries the number over to
    the next call under the name "heuristic"; here both of its names start every call from the same number.
    """

    def __init__(self, num_draft_tokens: int):
        self._num = num_draft_tokens

    @property
    def num_draft_tokens(self) -> int:
        """The current K."""
        return self._num

    def update(self, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Grow or shrink K by one round's outcome."""
        whole = sum(accepted >= drafted for drafted, accepted in zip(num_drafted, num_accepted, strict=True))
        step = 2 if 2 * whole >= len(num_drafted) else -1
        self._num = min(max(self._num + step, 1), MAX_ASSISTANT_TOKENS)
