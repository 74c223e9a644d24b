"""KV cache protocol: append states, roll rows back and select rows."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.errors import ShapeError
from hf_speculate.rows.row_lens import RowLens
from hf_speculate.transfers import upload
from hf_speculate.types import KVState


class LayerView(NamedTuple):
    """Read-only KV states of one layer, for another model to attend to.

    The tensors belong to the cache.
    """

    keys: Tensor  # [B, H, T, D]
    values: Tensor  # [B, H, T, D]
    # [B or 1, 1, T] bool: columns that hold no token of the row or lie before its window; None if
    # there are none
    hidden: Tensor | None


class ShortLayer(NamedTuple):
    """A layer that holds fewer columns than its forwards wrote."""

    layer: int
    num_columns: int


class KVCache(Protocol):
    """KV states with per-row rollback."""

    kind: str
    """Name of the cache kind in `speculation_cache`."""
    cache: Cache
    """The transformers cache for the model's forward."""
    can_mark: bool = True
    """Whether `mark` restores all states."""

    @property
    def num_columns(self) -> int:
        """Number of columns in the longest row, including padding."""

    @property
    def num_real_tokens(self) -> list[int]:
        """[B] number of real tokens in each row."""

    def mask(self, num_query: int) -> Tensor | dict[str, Tensor] | None:
        """Start a forward of `num_query` tokens and return its attention mask."""

    def position_ids(self, num_query: int) -> Tensor:
        """Count the real tokens before each query token; return [B or 1, num_query] int64."""

    def expect(self, num_tokens: int) -> None:
        """Announce the number of tokens per row until the next rollback, to make masks at once."""

    def advance(self, num_query: int) -> None:
        """Count the tokens of a successful forward."""
        return

    def short_layer(self, num_columns: int) -> ShortLayer | None:
        """Find the first layer with fewer columns than `num_columns` or than its window holds.

        The result is None if there is no such layer.
        """
        return None

    def get_num_tokens(self) -> int:
        """Return the number of real tokens in the longest row; 0 before the first update."""
        return max(self.num_real_tokens, default=0)

    def get_lens(self) -> Tensor:
        """Return the number of real tokens in each row, [B] int64 on the host."""
        return torch.tensor(self.num_real_tokens, device="cpu")

    def get_kv_states(self) -> list[KVState]:
        """Return one entry per layer; an empty list before the first update."""

    def view(self, layer: int, window: int | None = None) -> LayerView:
        """Return the states of a layer without a copy.

        Args:
            layer: index among the layers with text states.
            window: number of last tokens to return; None for all tokens. A layer with a window may
                hold one token less.
        """

    def last_positions(self) -> Tensor:
        """Return the position id of each row's last token, [B or 1, 1] int64."""

    def first_tokens(self, counts: Sequence[int]) -> list[KVState] | None:
        """Copy the states of each row's first `counts` [B] tokens, [B, H, N, D] per layer.

        The result is None if any of these states have been dropped.
        """

    def update(self, states: Sequence[KVState]) -> None:
        """Append states computed elsewhere, one [B, H, N, D] pair per layer."""

    def crop(
        self, num_tokens_crop: int | Sequence[int] | Tensor, like: RowLens | None = None
    ) -> None:
        """Drop the newest tokens of each row in place.

        Args:
            num_tokens_crop: one count for all rows, or [B] counts, each from 0 to the row's length.
            like: lengths that differ from the new row lengths, including padding, by one common
                number. Their tensor saves an upload.
        """

    def mark(self) -> Callable[[], None]:
        """Return a function that drops the columns of later forwards, even of a failed forward.

        Recurrent states are not restored; see `can_mark`.
        """

    @property
    def holds_rejected(self) -> bool:
        """Whether attention may still read masked states of rejected tokens."""
        return False

    def clear_rejected(self) -> None:
        """Zero the states of rejected tokens, because masked attention would keep their NaN."""
        return

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices` in place."""

    def skip_padding(self) -> int:
        """Skip the padding common to all rows of an empty cache; return its number of columns."""

    @property
    def join_obstacle(self) -> str:
        """Why rows of another cache of the same kind cannot join; empty if they can."""
        return ""

    def join(self, other: Any) -> None:
        """Append the rows of another cache of the same kind, which must not be used again."""

    def begin_recording(self) -> None:
        """Prepare for rollbacks; called after the prompt and before the first `crop`."""
        return

    def snapshot(self) -> Callable[[], None]:
        """Save the user's cache; return a function that restores it, even within a forward."""

    def hand_back(self) -> None:
        """Put the user's cache into the state that plain `generate` leaves."""

    def release(self) -> None:
        """Release the buffers. This is the last call, even after an error."""
        return


def leading(state: KVState, starts: Sequence[int], width: int) -> KVState:
    """Copy `width` columns of each row in [B, H, T, D] from the row's start on.

    The last column is repeated if there are too few. The result is [B, H, width, D].
    """
    device, last = state.keys.device, state.keys.shape[2] - 1
    columns = upload(starts, device)[:, None] + torch.arange(width, device=device)  # [B, width]
    return KVState(*(gathered(part, columns.clamp_max(last)) for part in state))


def gathered(states: Tensor, columns: Tensor) -> Tensor:
    """Gather the columns [B or 1, T] int64 of states [B, H, N, D]; return [B, H, T, D]."""
    index = columns[:, None, :, None]
    return states.gather(2, index.expand(*states.shape[:2], -1, states.shape[3]))


def checked_drops(num_tokens_crop: int | Sequence[int] | Tensor, lens: Sequence[int]) -> list[int]:
    """Return one count per row; raise a `ShapeError` if a count is out of range or missing."""
    counts = [num_tokens_crop] * len(lens) if isinstance(num_tokens_crop, int) else num_tokens_crop
    drops = [int(drop) for drop in counts]
    if len(drops) != len(lens):
        raise ShapeError(
            f"num_tokens_crop must be one count or [B] = [{len(lens)}], got [{len(drops)}]"
        )
    for row, (drop, length) in enumerate(zip(drops, lens, strict=True)):
        if not 0 <= drop <= length:
            raise ShapeError(
                f"num_tokens_crop must be in 0..{length} for row {row}, got {drop}; drop no more "
                "than is held"
            )
    return drops
