"""Protocols of processors and criteria for batches with leaving and joining rows."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class RowProcessors(Protocol):
    """Logits processors of B rows, for K+1 positions."""

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
        """Process a block, see `BlockLogitsProcessorList.__call__`; return [B, K+1, V] float32."""

    @property
    def reads_token_ids(self) -> bool:
        """Whether any processor reads more than the scores."""

    @property
    def keep_nan(self) -> bool:
        """Whether the scores of a position are NaN where its logits are."""

    @property
    def capture_key(self) -> Hashable | None:
        """Settings of processors for a device graph; equal ones launch the same operators.

        None if a processor reads more than the scores, or may read the host.
        """

    def forced_texts(self, tokens: "TokenRows", is_asked: Sequence[bool]) -> list[str]:
        """Return the forced text of each row, [B]; "" for rows with a choice or not asked for."""

    def forked(self) -> "RowProcessors":
        """Return the processors of one draft, with a fork in place of each one with state."""

    def split_warp(self) -> tuple["RowProcessors", dict[str, Any]]:
        """Return the processors before a last fused warper, and the arguments of its `warp_logits`.

        Without such a warper, return all processors and no arguments.
        """

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Take back the last `num_calls` [B] calls of each row."""

    def rows(self, indices: Sequence[int]) -> "RowProcessors":
        """Return the processors of the rows `indices`, in this order.

        `self` is not used afterwards.
        """

    def join(self, other: Any) -> None:
        """Append the rows of `other`."""


class TokenRows(Protocol):
    """Token ids of B rows on the host."""

    @property
    def token_ids(self) -> Tensor: ...  # [B, C] int64; columns past a row's end are undefined

    @property
    def lens(self) -> Sequence[int]: ...  # [B]


class StopVerdict(NamedTuple):
    """New tokens and end of each row."""

    num_emitted: list[int]  # [B] new tokens of token-by-token decoding; 0 only for an empty block
    is_done: list[bool]  # [B] whether token-by-token decoding stops there; False for an empty block


class RowCriteria(Protocol):
    """Stopping criteria of B rows."""

    def __call__(self, tokens: TokenRows, new_ids: Sequence[list[int]]) -> StopVerdict:
        """Cut each row's new tokens behind the first prefix at which any criterion stops."""

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in this order."""

    def join(self, other: Any) -> None:
        """Append the rows of `other`."""
