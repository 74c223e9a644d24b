"""The KV cache protocol: append states, roll back by row, select rows."""

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
    """Read-only KV states of one layer.

    Another model attends to them. The tensors are those of the cache.
    """

    keys: Tensor  # [B, H, T, D]
    values: Tensor  # [B, H, T, D]
    # [B or 1, 1, T] bool: columns without a token of the row, or before its window; None if none
    hidden: Tensor | None


class ShortLayer(NamedTuple):
    """Layer with fewer columns than its forwards wrote."""

    layer: int
    num_columns: int


class KVCache(Protocol):
    """KV states with rollback by row."""

    kind: str
    """Name of the kind in `speculation_cache`."""
    cache: Cache
    """Cache of transformers for the model's forward."""
    can_mark: bool = True
    """Whether `mark` restores all states."""

    @property
    def num_columns(self) -> int:
        """Columns of the longest row, padding included."""

    @property
    def num_real_tokens(self) -> list[int]:
        """[B] real tokens in each row."""

    def mask(self, num_query: int) -> Tensor | dict[str, Tensor] | None:
        """Start a forward of `num_query` tokens and return its attention mask."""

    def position_ids(self, num_query: int) -> Tensor:
        """Count the real tokens before each next token; return [B or 1, num_query] int64."""

    def expect(self, num_tokens: int) -> None:
        """Announce the tokens per row until the next rollback: masks are then made at once."""

    def advance(self, num_query: int) -> None:
        """Count the tokens of a successful forward."""
        return

    def short_layer(self, num_columns: int) -> ShortLayer | None:
        """Find the first layer with fewer than `num_columns` columns, or than its window.

        The result is None if no layer has fewer.
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
            layer: index among the layers with states of the text.
            window: number of last tokens to return; None for all. A layer with a window may hold
                one less.
        """

    def last_positions(self) -> Tensor:
        """Return the position id of each row's last token, [B or 1, 1] int64."""

    def first_tokens(self, counts: Sequence[int]) -> list[KVState] | None:
        """Copy the states of each row's first `counts` [B] tokens, [B, H, N, D] per layer.

        The result is None if any of them is gone.
        """

    def update(self, states: Sequence[KVState]) -> None:
        """Append states from elsewhere, one [B, H, N, D] pair per layer."""

    def crop(
        self, num_tokens_crop: int | Sequence[int] | Tensor, like: RowLens | None = None
    ) -> None:
        """Drop the newest tokens of each row, in place.

        Args:
            num_tokens_crop: one count for all rows, or [B] counts, each in 0..the row's length.
            like: lengths of the rows, padding included, up to one common difference. Their tensor
                saves an upload.
        """

    def mark(self) -> Callable[[], None]:
        """Return a function to drop the columns of later forwards, even of a failed one.

        Recurrent states are not restored; see `can_mark`.
        """

    @property
    def holds_rejected(self) -> bool:
        """Whether attention may still read masked states of rejected tokens."""
        return False

    def clear_rejected(self) -> None:
        """Zero the states of rejected tokens: attention multiplies them by 0, and NaN stays NaN."""
        return

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in place."""

    def skip_padding(self) -> int:
        """Skip the padding before all rows of an empty cache; return its number of columns."""

    @property
    def join_obstacle(self) -> str:
        """Reason against joining rows of another cache of the same kind; empty if they can join."""
        return ""

    def join(self, other: Any) -> None:
        """Append the rows of another cache of the same kind. It must not be used afterwards."""

    def begin_recording(self) -> None:
        """Prepare for rollbacks, after the prompt and before the first `crop`."""
        return

    def snapshot(self) -> Callable[[], None]:
        """Save the user's cache; return a function to restore it, even within a forward."""

    def hand_back(self) -> None:
        """Bring the user's cache to the state after plain `generate`."""

    def release(self) -> None:
        """Release the buffers. This is the last call, also after an error."""
        return


def leading(state: KVState, starts: Sequence[int], width: int) -> KVState:
    """Copy `width` columns of each row of [B, H, T, D], from its start on; return [B, H, width, D].

    The last column is repeated if there are too few.
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
