"""Protocols of processors and criteria for batches whose rows leave and join."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class RowProcessors(Protocol):
    """Logits processors for B rows and K+1 positions."""

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
        """Process a block and return [B, K+1, V] float32; see `BlockLogitsProcessorList`."""

    @property
    def reads_token_ids(self) -> bool:
        """Whether any processor reads more than the scores."""

    @property
    def keep_nan(self) -> bool:
        """Whether the scores of a position are NaN wherever its logits are."""

    @property
    def capture_key(self) -> Hashable | None:
        """Key of the processors for a device graph; equal keys launch the same operators.

        None if a processor reads more than the scores or may read the host.
        """

    def forced_texts(self, tokens: "TokenRows", is_asked: Sequence[bool]) -> list[str]:
        """Return the forced texts [B]; "" for rows that have a choice or are not asked for."""

    def forked(self) -> "RowProcessors":
        """Return the processors for one draft, with a fork of each stateful processor."""

    def split_warp(self) -> tuple["RowProcessors", dict[str, Any]]:
        """Split off a fused warper at the end of the list.

        Return the processors before it and its `warp_logits` arguments. Without such a warper,
        return all processors and no arguments.
        """

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Take back the last `num_calls` [B] calls of each row."""

    def rows(self, indices: Sequence[int]) -> "RowProcessors":
        """Return the processors for the rows `indices`, in this order.

        `self` must not be used afterwards.
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
    """The number of new tokens and the end of each row."""

    num_emitted: list[int]  # [B] new tokens in token-by-token decoding; 0 only for an empty block
    is_done: list[bool]  # [B] whether token-by-token decoding stops there; False for an empty block


class RowCriteria(Protocol):
    """Stopping criteria for B rows."""

    def __call__(self, tokens: TokenRows, new_ids: Sequence[list[int]]) -> StopVerdict:
        """Cut each row's new tokens after the first prefix at which any criterion stops."""

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in this order."""

    def join(self, other: Any) -> None:
        """Append the rows of `other`."""
