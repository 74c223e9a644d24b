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
    """The states of one layer as another model attends to them: the cache's own tensors, which must not be changed."""

    keys: Tensor  # [B, H, T, D]
    values: Tensor  # [B, H, T, D]
    # [B or 1, 1, T] bool: the columns without a token of the row, or with one before the window; None if there are none
    hidden: Tensor | None


class ShortLayer(NamedTuple):
    """A layer that holds fewer columns than the forwards have given it."""

    layer: int
    num_columns: int


class KVCache(Protocol):
    """States of B rows that can be rolled back row by row."""

    kind: str
    """Its name among the choices of `speculation_cache`."""
    cache: Cache
    """The transformers cache that the model's forward writes to and reads from."""

    @property
    def num_columns(self) -> int:
        """Columns of the longest row, padding included."""

    @property
    def num_real_tokens(self) -> list[int]:
        """[B] real tokens in each row."""

    def mask(self, num_query: int) -> Tensor | dict[str, Tensor] | None:
        """The attention mask for a forward of `num_query` tokens, which is announced hereby."""

    def position_ids(self, num_query: int) -> Tensor:
        """[B or 1, num_query] int64: how many real tokens stand before each next token."""

    def expect(self, num_tokens: int) -> None:
        """Announce the tokens of each row before the next rollback: masks and positions are made for all at once."""

    def advance(self, num_query: int) -> None:
        """Count the tokens of a forward that went well."""
        return

    def short_layer(self, num_columns: int) -> ShortLayer | None:
        """The first layer with fewer than `num_columns` columns, or its window of them; None if no layer has."""
        return None

    def get_num_tokens(self) -> int:
        """Real tokens in the longest row; 0 before the first update."""
        return max(self.num_real_tokens, default=0)

    def get_lens(self) -> Tensor:
        """[B] int64 on the host, real tokens in each row."""
        return torch.tensor(self.num_real_tokens, device="cpu")

    def get_kv_states(self) -> list[KVState]:
        """One entry per layer; empty before the first update."""

    def view(self, layer: int, window: int | None = None) -> LayerView:
        """The states of the rows' tokens in a layer, without a copy; of the last `window` tokens at most.

        Layers are those that hold states of the text, in their order. A layer with a window may hold one token less.
        """

    def last_positions(self) -> Tensor:
        """[B or 1, 1] int64: the position id of each row's last token."""

    def first_tokens(self, counts: Sequence[int]) -> list[KVState] | None:
        """Copies of the states of each row's first `counts` [B] tokens by layer, [B, H, N, D]; None if any is gone."""

    def update(self, states: Sequence[KVState]) -> None:
        """Append states from elsewhere, one [B, H, N, D] pair per layer."""

    def crop(self, num_tokens_crop: int | Sequence[int] | Tensor, like: RowLens | None = None) -> None:
        """Drop the newest tokens of each row, in place: one count for all, or [B] counts, each in 0..the row's length.

        The rows' lengths, padding included, may differ by one number from those `like`, whose tensor spares an upload.
        """

    @property
    def holds_rejected(self) -> bool:
        """Whether attention may still read, under a mask, what rejected tokens have written."""
        return False

    def clear_rejected(self) -> None:
        """Overwrite what rejected tokens have written with zeros: attention multiplies a masked NaN by zero."""
        return

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the named rows, in place."""

    def skip_padding(self) -> int:
        """Skip the padding before all rows of an empty cache; returns how many columns that is."""

    @property
    def join_obstacle(self) -> str:
        """Why rows of another cache of the same kind cannot join; empty if they can."""
        return ""

    def join(self, other: Any) -> None:
        """Add the rows of another cache of the same kind behind these; nobody keeps the states or uses `other`."""

    def begin_recording(self) -> None:
        """Called once the prompt is in, before the first `crop`."""
        return

    def snapshot(self) -> Callable[[], None]:
        """A function that brings the user's cache back to what it holds now, also from the middle of a forward."""

    def hand_back(self) -> None:
        """Leave the user's cache as plain `generate` would."""

    def release(self) -> None:
        """Called last, also after an error; nothing else is called after it."""
        return


def leading(state: KVState, starts: Sequence[int], width: int) -> KVState:
    """Copies [B, H, width, D] of the columns of [B, H, T, D] from each row's start on; the last one fills up."""
    device, last = state.keys.device, state.keys.shape[2] - 1
    columns = upload(starts, device)[:, None] + torch.arange(width, device=device)  # [B, width]
    return KVState(*(gathered(part, columns.clamp_max(last)) for part in state))


def gathered(states: Tensor, columns: Tensor) -> Tensor:
    """[B, H, T, D]: the columns [B or 1, T] int64 of states [B, H, N, D]."""
    index = columns[:, None, :, None]
    return states.gather(2, index.expand(*states.shape[:2], -1, states.shape[3]))


def checked_drops(num_tokens_crop: int | Sequence[int] | Tensor, lens: Sequence[int]) -> list[int]:
    """One count per row; a `ShapeError` if one is out of range or missing."""
    counts = [num_tokens_crop] * len(lens) if isinstance(num_tokens_crop, int) else num_tokens_crop
    drops = [int(drop) for drop in counts]
    if len(drops) != len(lens):
        raise ShapeError(f"num_tokens_crop must be one count or [B] = [{len(lens)}], got [{len(drops)}]")
    for row, (drop, length) in enumerate(zip(drops, lens, strict=True)):
        if not 0 <= drop <= length:
            raise ShapeError(
                f"num_tokens_crop must be in 0..{length} for row {row}, got {drop}; drop no more than is held"
            )
    return drops
