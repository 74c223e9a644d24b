"""Protocols of logits processors and stopping criteria of a batch whose rows leave and join."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class RowProcessors(Protocol):
    """Runs the logits processors of B rows on all K+1 positions of a round."""

    @property
    def can_join(self) -> bool:
        """Whether rows with other processors may join."""

    def __len__(self) -> int: ...

    def __call__(
        self,
        input_ids: Tensor,
        scores: Tensor,
        draft_token_ids: Tensor | None = None,
        prefix_lens: Sequence[int] | None = None,
    ) -> Tensor:
        """[B, K+1, V] float32; see `BlockLogitsProcessorList.__call__`, in the block form."""

    @property
    def reads_token_ids(self) -> bool:
        """Whether any processor reads more than the scores."""

    @property
    def keep_nan(self) -> bool:
        """Whether the scores of a position are NaN where its logits are."""

    def forced_texts(self, tokens: "TokenRows", is_asked: Sequence[bool]) -> list[str]:
        """[B] texts that must follow the rows; "" for rows with a choice, or not asked for."""

    def forked(self) -> "RowProcessors":
        """The processors of one draft, with a fork in place of each one that has state."""

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Take back each row's last calls, as many as `num_calls` [B]."""

    def rows(self, indices: Sequence[int]) -> "RowProcessors":
        """The processors of the rows `indices`, in that order; these are not used after that."""

    def join(self, other: Any) -> None:
        """Add the rows of `other` behind these."""


class TokenRows(Protocol):
    """B rows of token ids of different lengths, on the host, such as a `TokenBuffer`."""

    @property
    def token_ids(self) -> Tensor: ...  # [B, C] int64; columns past a row's end are undefined

    @property
    def lens(self) -> Sequence[int]: ...  # [B] the length of each row


class StopVerdict(NamedTuple):
    """The verdict of stopping criteria: how many tokens of each row's block count."""

    num_emitted: list[int]  # [B], new tokens that token-by-token decoding would have emitted; 0 only for an empty block
    is_done: list[bool]  # [B], whether it would have stopped there; False for an empty block


class RowCriteria(Protocol):
    """Runs the stopping criteria of B rows on a round's new tokens."""

    def __call__(self, tokens: TokenRows, new_ids: Sequence[list[int]]) -> StopVerdict:
        """Cut each row's new tokens at the first prefix that any criterion ends."""

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in that order."""

    def join(self, other: Any) -> None:
        """Add the rows of `other` behind these."""
