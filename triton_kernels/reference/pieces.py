"""The parts of rows that hold anything of a law: after top-k they are few, and the rest need not be touched."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Warp
from .rows import PIECE_SIZE, TILE_SIZE, pick_rows, scale

# Looking at pieces is worth it up to this share of them.
MAX_KEPT_SHARE = 0.25
# As a cutoff it drops -inf alone.
LOWEST = torch.finfo(torch.float32).min


class Pieces(NamedTuple):
    """Parts of rows [..., V]: P of them with S entries each, or all rows as they are."""

    where: tuple[Tensor, ...] | None  # [P] int64 each: which row, which piece of it; None: all rows, P of them
    shape: tuple[int, ...]  # [..., N], N pieces in a row
    size: int  # S

    def of(self, rows: Tensor) -> Tensor:
        """The parts [P, S] of `rows` [..., V]; all rows may be a view."""
        if self.where is None:
            return rows.reshape(-1, self.size)
        return torch.unflatten(rows, -1, (-1, self.size))[self.where]

    def at(self, positions: Tensor) -> "Pieces":
        """Of pieces of [B, R, V], those in row `positions[b]` [B] int64 of every batch row, as pieces of [B, V]."""
        if self.where is None:
            return Pieces(None, (self.shape[0], 1), self.size)
        row, position, piece = self.where
        chosen = (position == positions[row]).nonzero().squeeze(-1)
        return Pieces((row[chosen], piece[chosen]), (self.shape[0], self.shape[-1]), self.size)

    def of_row(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Of pieces of [B, V], the parts [P, S] of row `positions[b]` [B] int64 of every batch row of [B, R, V]."""
        if self.where is None:
            return pick_rows(rows, positions)
        row, piece = self.where
        return torch.unflatten(rows, -1, (-1, self.size))[row, positions[row], piece]

    def spread(self, values: Tensor) -> Tensor:
        """Every part's own entry [P] of `values` [...], one a row."""
        return values.reshape(-1) if self.where is None else values[self.where[:-1]]

    def collect(self, values: Tensor) -> Tensor:
        """Put `values` [P], one a part, where the parts lie: [..., N], 0 elsewhere."""
        if self.where is None:
            return values.view(self.shape)
        collected = values.new_zeros(self.shape)
        collected[self.where] = values
        return collected

    def token_ids(self, device: torch.device) -> Tensor:
        """Ids of the entries, [P, S] or [S] int32."""
        inside = torch.arange(self.size, dtype=torch.int32, device=device)
        if self.where is None:
            return inside
        return torch.add(inside, self.where[-1].to(torch.int32).unsqueeze(-1), alpha=self.size)


def whole(rows: Tensor) -> Pieces:
    """All of `rows` [..., V]."""
    return Pieces(None, (*rows.shape[:-1], 1), rows.shape[-1])


def _cut(rows: Tensor) -> Tensor | None:
    """`rows` [..., V] as [..., N, PIECE_SIZE], where V allows it; on a CPU, for the host must know the pieces."""
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if rows.shape[-1] % PIECE_SIZE or rows.shape[-1] <= TILE_SIZE:
        return None
    return torch.unflatten(rows, -1, (-1, PIECE_SIZE))


def _some(is_live: Tensor) -> Pieces | None:
    """Where `is_live` [..., N] holds; None if in too many places."""
    where = is_live.nonzero(as_tuple=True)
    if where[0].numel() > MAX_KEPT_SHARE * is_live.numel():
        return None
    return Pieces(where, tuple(is_live.shape), PIECE_SIZE)


def _looks_whole(cut: Tensor) -> bool:
    """Whether what a glance shows of `cut` [B, ..., N, PIECE_SIZE] holds no piece without a law."""
    glance = cut.flatten(0, -3)[0, :: max(cut.shape[-2] // 32, 1)]
    return bool((glance.amax(-1) > -torch.inf).all())


def live_pieces(weights: Tensor) -> Pieces:
    """Where `weights` [..., V] are not 0."""
    cut = _cut(weights)
    # A NaN is alive.
    pieces = None if cut is None else _some((cut.amax(-1) <= 0).logical_not_())
    return whole(weights) if pieces is None else pieces


def kept_pieces(logits: Tensor, warp: Warp) -> tuple[Pieces, Tensor | None]:
    """Where cutoffs or -inf leave something of `logits` [B, ..., V].

    Returns:
        The pieces; and, unless they are whole rows, the largest kept logit of every row, [B, ...] float32.
    """
    cut = _cut(logits)
    if cut is None or cut.numel() == 0 or (warp.row_cutoffs is None and _looks_whole(cut)):
        return whole(logits), None
    peaks = cut.amax(-1)  # dividing keeps their order
    peaks = scale(peaks, warp.temperature, torch.empty(peaks.shape, dtype=torch.float32))
    cutoffs = None if warp.row_cutoffs is None else warp.row_cutoffs.to(torch.float32)
    is_dropped = peaks < (LOWEST if cutoffs is None else cutoffs.unsqueeze(-1))
    pieces = _some(is_dropped.logical_not_())
    if pieces is None:
        return whole(logits), None
    tops = peaks.amax(-1)
    return pieces, tops if cutoffs is None else tops.masked_fill_(tops < cutoffs, -torch.inf)
