"""Columns of preallocated buffers: where rows begin and end, where the next forwards write, and what they see."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_speculate.cache.row_lens import RowLens, Ruler
from hf_speculate.per_row import PerRow
from hf_speculate.transfers import upload

# Entries of a mask from one query to the next, and before its first column: attention on a GPU loads 16 bytes at once.
MASK_UNIT = 8
MAX_CORNERS = 16  # kept at once; one for each shape of buffers
_PLAIN_STEPS = 16  # plain steps whose masks, positions and places are computed together
_PADDING = torch.iinfo(torch.int64).max  # as a column's position: after all tokens


@dataclass
class Mask:
    """What queries of the coming tokens see of a range of columns."""

    values: Tensor  # [B or 1, 1, N, W] additive
    first_token: int  # of the coming ones
    first_column: int


@dataclass
class Coming:
    """Masks, positions and places of the next tokens, made once for all forwards before the next rollback."""

    lens: RowLens  # of the rows, before the first of these tokens
    num_tokens: int  # N, of each row
    num_done: int = 0  # those that forwards have read
    positions: Tensor | None = None  # [B or 1, N] int64, real tokens before each of them
    masks: dict[int | None, Mask] = field(default_factory=dict)  # by the layers' window
    places: dict[Hashable, Tensor] = field(default_factory=dict)  # [N, B, H] int64, by the shape of the buffers

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_done


class Columns(PerRow):
    """Where each row begins and ends in the buffers, and where the coming forward writes; for all layers."""

    BY_ROW = ("pads",)
    PARTS = ("row_lens",)

    def __init__(
        self,
        pads: Sequence[int],  # [B] columns of padding before each row's first token
        max_columns: int | None = None,
        capacity: int | None = None,  # columns that every buffer has from the start; None if buffers grow
        device: torch.device | str = "cpu",
        mask_dtype: torch.dtype = torch.float32,  # of additive masks
    ):
        self.pads = list(pads)
        self.row_lens = RowLens([0] * len(self.pads), Ruler(device))
        self.max_columns = max_columns
        self.capacity = capacity
        self.num_query = 0
        self.is_masked = False  # the coming forward is handed an additive mask
        self.coming = Coming(self.row_lens.copy(), 0)
        self._num_expected = 0
        self._places: dict[Hashable, Tensor] = {}  # of the coming forward
        self._corners: dict[Hashable, Tensor] = {}
        self._pads: Tensor | None = None  # see `_pads_on_device`
        self._column_positions: Tensor | None = None  # [B, C] int64, of each row's columns
        self._masked = torch.full((), -torch.inf, dtype=mask_dtype, device=device)  # in a mask
        self._unmasked = torch.zeros((), dtype=mask_dtype, device=device)

    @property
    def lens(self) -> list[int]:
        """[B] columns of each row, padding included."""
        return self.row_lens.on_host

    @property
    def device(self) -> torch.device:
        return self.row_lens.ruler.device

    @property
    def is_even(self) -> bool:
        return self.row_lens.is_even

    @property
    def num_held(self) -> int:
        """Columns that some row uses."""
        return max(self.lens, default=0)

    @property
    def end(self) -> int:
        """Columns that some row uses once the coming tokens are written."""
        return self.num_held + self.num_query

    def first_seen(self, window: int | None) -> int:
        """The first column that layers of this window hand to attention in the coming forward."""
        if window is None or self.capacity is not None:
            return 0
        first = max(min(self.lens) - window + 1, 0)
        if self.is_masked and self.device.type == "cuda":
            first -= first % MASK_UNIT  # the mask hides what is too old
        return first

    def expect(self, num_tokens: int) -> None:
        self._num_expected = num_tokens
        self.coming = Coming(self.row_lens.copy(), 0)

    def begin(self, num_query: int) -> None:
        self.num_query, self.is_masked, self._places = num_query, False, {}
        if self.coming.num_left < num_query:
            num_expected = self._num_expected
            if num_query == 1 and self.coming.num_done:  # no rollback since the last forward: plain steps
                num_expected = max(num_expected, _PLAIN_STEPS)
            self.coming = Coming(self.row_lens.copy(), max(num_query, num_expected))
            self._num_expected = 0

    def advance(self, num_query: int) -> None:
        self.row_lens.add(num_query)
        self.coming.num_done += num_query

    def cut(self, lens: Sequence[int], like: RowLens | None = None) -> None:
        """Let rows end at other columns; see `RowLens.set`."""
        self.row_lens.set(lens, like)
        self.expect(0)

    def drop_padding(self) -> int:
        """Drop the first columns that are padding in all rows; how many these were."""
        surplus = self.skip_padding() if self.num_held else 0
        self.row_lens.add(-surplus)
        return surplus

    def skip_padding(self) -> int:
        """Forget the padding before all rows; how many columns it has."""
        surplus = min(self.pads, default=0)
        self.pads = [pad - surplus for pad in self.pads]
        if self.max_columns is not None:
            self.max_columns -= surplus
        self.forget()
        return surplus

    def join(self, other: "Columns") -> None:
        bounds = self.max_columns, other.max_columns
        self.max_columns = None if None in bounds else max(bound for bound in bounds if bound is not None)
        super().join(other)

    def forget(self) -> None:
        self._corners, self._pads, self._column_positions = {}, None, None
        self.expect(0)

    def places(self, num_heads: int, capacity: int, base: int, device: torch.device) -> Tensor:
        """[B * H * Q] int64: where the coming tokens go in [B * H * capacity, D], which begins at column `base`."""
        key = (num_heads, capacity, base, device)
        if key in self._places:
            return self._places[key]
        coming, corner = self.coming, self._corner(key)
        if coming.num_tokens == self.num_query:
            columns = coming.lens.columns(self.num_query).to(device)  # [B or 1, Q]
            places = corner[:, :, None] + columns[:, None]  # [B, H, Q]
        else:
            if key not in coming.places:
                columns = coming.lens.columns(coming.num_tokens).to(device)  # [B or 1, N]
                coming.places[key] = corner + columns.T[:, :, None]  # [N, B, H], of which single tokens are compact
            places = coming.places[key][coming.num_done : coming.num_done + self.num_query].permute(1, 2, 0)
        self._places[key] = places.flatten()
        return self._places[key]

    def _corner(self, key: tuple[int, int, int, torch.device]) -> Tensor:
        """[B, H] int64: where the buffer's row of each head begins in the flat buffer, less its first column."""
        if key not in self._corners:
            if len(self._corners) == MAX_CORNERS:
                self._corners = {}  # of buffers that have grown since
            num_heads, capacity, base, device = key
            rows = torch.arange(len(self.lens) * num_heads, device=device).view(-1, num_heads)
            self._corners[key] = rows * capacity - base
        return self._corners[key]

    def padding(self) -> Tensor | None:
        """[B, T + Q] int64: 1 for real tokens, of which the coming ones are the last; None if nothing is padded."""
        pads = self._pads_on_device()
        return None if pads is None else (self.row_lens.ruler.span(0, self.end) >= pads).to(torch.int64)

    def positions(self, num_query: int) -> Tensor:
        """[B or 1, Q] int64: real tokens before each of the next ones; negative in padding."""
        coming = self.coming
        if coming.positions is None:
            coming.positions = coming.lens.positions(coming.num_tokens, pads=self._pads_on_device())
        return coming.positions[:, coming.num_done : coming.num_done + num_query]

    def mask(self, window: int | None) -> Tensor:
        """[B or 1, 1, Q, T] additive: 0 where a query sees a column, -inf elsewhere; without a window it sees all."""
        coming = self.coming
        made = coming.masks.get(window)
        row = coming.num_done - (0 if made is None else made.first_token)
        if made is None or row + self.num_query > made.values.shape[2]:
            made, row = self._make_mask(window), 0
            coming.masks[window] = made
        first = self.first_seen(window) - made.first_column
        return made.values[:, :, row : row + self.num_query, first : self.end - made.first_column]

    def _make_mask(self, window: int | None) -> Mask:
        coming = self.coming
        is_ragged = any(self.pads) or not self.is_even
        num_tokens = coming.num_left if is_ragged else self.num_query  # later queries of even rows need none
        first = self.first_seen(window)
        width = -(-(self.num_held + num_tokens - first) // MASK_UNIT) * MASK_UNIT
        seen = self._positions_of(first, width)[:, None]  # [B or 1, 1, W]
        at = self.positions(num_tokens)[:, :, None]  # [B or 1, N, 1]
        values = torch.where(hidden(seen, at, window), self._masked, self._unmasked)[:, None]
        return Mask(values, coming.num_done, first)

    def _positions_of(self, first: int, width: int) -> Tensor:
        """[B or 1, W] int64: of a range of columns; those of padding come after all tokens."""
        ruler, end, pads = self.row_lens.ruler, first + width, self._pads_on_device()
        if pads is None:
            return ruler.span(first, width)[None]
        if self._column_positions is None or self._column_positions.shape[1] < end:
            positions = ruler.span(0, 2 * end) - pads
            self._column_positions = positions.masked_fill_(positions < 0, _PADDING)
        return self._column_positions[:, first:end]

    def _pads_on_device(self) -> Tensor | None:
        """[B, 1] int64; None if nothing is padded."""
        if self._pads is None and any(self.pads):
            self._pads = upload(self.pads, self.device)[:, None]
        return self._pads


def hidden(seen: Tensor, at: Tensor, window: int | None) -> Tensor:
    """[B or 1, Q, T] bool: what queries at `at` [B or 1, Q, 1] do not see of `seen` [T] or [B or 1, 1, T]."""
    is_later = seen > at
    return is_later if window is None else is_later | (seen <= at - window)


def additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, N, T]: -inf where [B, N, T] bool is set, 0 elsewhere."""
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, -torch.inf)[:, None]
