"""Sparse rows: after top-k, only the few pieces of a row with nonzero probability are read."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Warp
from .rows import PIECE_SIZE, TILE_SIZE, pick_rows, scale

# Pieces are faster than full rows if at most this share of the pieces is kept.
MAX_KEPT_SHARE = 0.25
# A cutoff below all finite logits, which masks only -inf.
LOWEST = torch.finfo(torch.float32).min


class Pieces(NamedTuple):
    """P pieces of S entries each from rows [..., V], or all rows in full."""

    # [P] int64 each: the indices of the row, and the index of the piece; None for full rows
    indices: tuple[Tensor, ...] | None
    shape: tuple[int, ...]  # [..., N], N pieces per row
    size: int  # S

    def gather(self, rows: Tensor) -> Tensor:
        """Gather the pieces [P, S] of `rows` [..., V]; full rows may be a view."""
        if self.indices is None:
            return rows.reshape(-1, self.size)
        return torch.unflatten(rows, -1, (-1, self.size))[self.indices]

    def select(self, positions: Tensor) -> "Pieces":
        """Select the pieces of one row `positions[b]` [B] int64 per batch row.

        These pieces refer to [B, R, V], the selected pieces to [B, V].
        """
        if self.indices is None:
            return Pieces(None, (self.shape[0], 1), self.size)
        row, position, piece = self.indices
        chosen = (position == positions[row]).nonzero().squeeze(-1)
        return Pieces((row[chosen], piece[chosen]), (self.shape[0], self.shape[-1]), self.size)

    def gather_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Gather the entries [P, S] of row `positions[b]` [B] int64 per batch row.

        These pieces refer to [B, V], and the rows are [B, R, V].
        """
        if self.indices is None:
            return pick_rows(rows, positions)
        row, piece = self.indices
        return torch.unflatten(rows, -1, (-1, self.size))[row, positions[row], piece]

    def expand(self, values: Tensor) -> Tensor:
        """Expand `values` [...] from one per row to one per piece, [P]."""
        return values.reshape(-1) if self.indices is None else values[self.indices[:-1]]

    def scatter(self, values: Tensor) -> Tensor:
        """Scatter `values` [P], one per piece, into zeros [..., N]."""
        if self.indices is None:
            return values.view(self.shape)
        scattered = values.new_zeros(self.shape)
        scattered[self.indices] = values
        return scattered

    def row_max(self, entries: Tensor) -> Tensor:
        """Return the largest of the entries [P, S] of every row, [...]; at least 0 if not full."""
        tops = entries.amax(-1)
        return tops.view(self.shape[:-1]) if self.indices is None else self.scatter(tops).amax(-1)

    def token_ids(self, device: torch.device) -> Tensor:
        """Return the token ids of the entries, [P, S] or [S] int32."""
        inside = torch.arange(self.size, dtype=torch.int32, device=device)
        if self.indices is None:
            return inside
        return torch.add(inside, self.indices[-1].to(torch.int32).unsqueeze(-1), alpha=self.size)


def full_rows(rows: Tensor) -> Pieces:
    """Wrap `rows` [..., V] as one piece per row."""
    return Pieces(None, (*rows.shape[:-1], 1), rows.shape[-1])


def _split(rows: Tensor) -> Tensor | None:
    """View `rows` [..., V] as [..., N, PIECE_SIZE].

    Returns:
        None if V is too small or not a multiple of PIECE_SIZE, or on devices other than the CPU,
        where reading the pieces would sync.
    """
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if rows.shape[-1] % PIECE_SIZE or rows.shape[-1] <= TILE_SIZE:
        return None
    return torch.unflatten(rows, -1, (-1, PIECE_SIZE))


def _select_kept(is_kept: Tensor) -> Pieces | None:
    """Return the pieces where `is_kept` [..., N] is True; None if there are too many."""
    indices = is_kept.nonzero(as_tuple=True)
    if indices[0].numel() > MAX_KEPT_SHARE * is_kept.numel():
        return None
    return Pieces(indices, tuple(is_kept.shape), PIECE_SIZE)


def _is_likely_dense(split: Tensor) -> bool:
    """Return whether a sample of pieces of `split` [B, ..., N, PIECE_SIZE] looks dense.

    The sample has about 32 pieces. In a dense row, no piece consists of only -inf.
    """
    sample = split.flatten(0, -3)[0, :: max(split.shape[-2] // 32, 1)]
    return bool((sample.amax(-1) > -torch.inf).all())


def nonzero_pieces(weights: Tensor) -> Pieces:
    """Return the pieces of `weights` [..., V] with an entry > 0 or a NaN."""
    split = _split(weights)
    pieces = None if split is None else _select_kept((split.amax(-1) <= 0).logical_not_())
    return full_rows(weights) if pieces is None else pieces


def kept_pieces(logits: Tensor, warp: Warp) -> tuple[Pieces, Tensor | None]:
    """Return the pieces of logits [B, ..., V] with an entry above -inf and the cutoff.

    Returns:
        The pieces, and the largest kept logit of every row, [B, ...] float32; None for full rows.
    """
    split = _split(logits)
    if (
        split is None
        or split.numel() == 0
        or (warp.row_cutoffs is None and _is_likely_dense(split))
    ):
        return full_rows(logits), None
    peaks = split.amax(-1)  # the temperature does not change the order
    peaks = scale(
        peaks, warp.temperature, torch.empty(peaks.shape, dtype=torch.float32, device=peaks.device)
    )
    cutoffs = None if warp.row_cutoffs is None else warp.row_cutoffs.to(torch.float32)
    is_dropped = peaks < (LOWEST if cutoffs is None else cutoffs.unsqueeze(-1))
    pieces = _select_kept(is_dropped.logical_not_())
    if pieces is None:
        return full_rows(logits), None
    tops = peaks.amax(-1)
    return pieces, tops if cutoffs is None else tops.masked_fill_(tops < cutoffs, -torch.inf)
