"""Softmax of rows of logits: unnormalised probabilities ("masses"), their sums and log-sum-exps.

Every result depends only on its own row and is bitwise reproducible.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Warp
from .pieces import Pieces, full_rows, kept_pieces
from .rows import PIECE_SIZE, PLAIN, TILE_SIZE, chunks, padded_like, row_sum, scale, warp_of

LOG2_E = 1.4426950408889634


class Masses(NamedTuple):
    """Unnormalised probabilities of every row."""

    masses: Tensor  # [..., V] float32, exp(x - max)
    sums: Tensor  # [...] float32, sums of the masses
    # [...] float32; NaN, +inf or -inf for rows with NaN, with +inf, or with only -inf
    logsumexp: Tensor


class Sums(NamedTuple):
    """Log-sum-exps of rows, and the pieces with nonzero probability."""

    logsumexp: Tensor  # [...] float32, as in `Masses`
    pieces: Pieces


class KeptMasses(NamedTuple):
    """Masses of the pieces with nonzero probability."""

    pieces: Pieces
    masses: Tensor  # [P, S] float32
    tops: Tensor  # [...] float32, the largest logit of every row


def piece_masses(pieces: Pieces, raw: Tensor, warp: Warp, bases: Tensor) -> Tensor:
    """Compute exp(x - base) for pieces of logits, [P, S] float32 in new memory; 0 if masked.

    Args:
        pieces: pieces of logits [B, ..., V].
        raw: [P, S], their raw logits.
        warp: temperature and cutoffs.
        bases: [B, ...] float32, maxima or log-sum-exps; log-sum-exps give probabilities.
    """
    rows = padded_like(raw)
    temperature = warp.temperature
    if isinstance(temperature, Tensor):
        leading = pieces.shape[:-1]
        temperature = pieces.expand(
            temperature.view((-1,) + (1,) * (len(leading) - 1)).expand(leading)
        )
    scaled = _scaled(raw, temperature, rows)
    cutoffs = (
        None if warp.row_cutoffs is None else pieces.expand(warp.row_cutoffs.to(torch.float32))
    )
    dropped = _to_exponents(rows, scaled, cutoffs, pieces.expand(bases))
    masses = rows.exp2_()[..., : raw.shape[-1]]
    return masses if dropped is None else masses.addcmul_(masses, dropped, value=-1)


def _kept_masses(logits: Tensor, warp: Warp) -> KeptMasses | None:
    """Compute the masses of the kept pieces; None if full rows are faster."""
    pieces, tops = kept_pieces(logits, warp)
    return (
        None
        if tops is None
        else KeptMasses(pieces, piece_masses(pieces, pieces.gather(logits), warp, tops), tops)
    )


def write_masses(rows: Tensor, logits: Tensor, warp: Warp) -> tuple[Tensor, Tensor]:
    """Write the masses into `rows` from `padded_like`; return the row maxima and the sums."""
    tops, dropped = _write_exponents(rows, logits, warp)
    return tops, _masked_sum(rows.exp2_(), logits.shape[-1], dropped)


def _write_exponents(rows: Tensor, logits: Tensor, warp: Warp) -> tuple[Tensor, Tensor | None]:
    """Write log2 of the masses into `rows` from `padded_like`.

    Returns:
        The row maxima, and a mask (1.0 = masked) or None.
    """
    scaled = _scaled(logits, warp.temperature, rows)
    tops = scaled.amax(-1)
    cutoffs = None if warp.row_cutoffs is None else warp.row_cutoffs.to(torch.float32)
    if cutoffs is not None:
        tops.masked_fill_(tops < cutoffs, -torch.inf)
    return tops, _to_exponents(rows, scaled, cutoffs, tops)


def _scaled(logits: Tensor, temperature: float | Tensor, rows: Tensor) -> Tensor:
    """Divide logits by the temperature.

    Returns:
        The logits themselves if nothing changes, otherwise the front of `rows`.
    """
    is_plain = (
        not isinstance(temperature, Tensor) and temperature == 1.0 and logits.dtype == torch.float32
    )
    # A compiler does not accept a slice of another tensor as `out`.
    if is_plain and not torch.compiler.is_compiling():
        return logits
    return scale(logits, temperature, rows[..., : logits.shape[-1]])


def _to_exponents(
    rows: Tensor, scaled: Tensor, cutoffs: Tensor | None, bases: Tensor
) -> Tensor | None:
    """Write log2(exp(x - base)) of `scaled` [..., V] to the front of `rows` [..., W].

    Returns:
        A mask (1.0 = masked), or None without cutoffs. The mask is float because, on a CPU, a
        multiplication takes a tenth of the time of masked_fill with a bool mask (V = 151,936).
    """
    dropped = (
        None
        if cutoffs is None
        else torch.lt(scaled, cutoffs.unsqueeze(-1), out=torch.empty_like(scaled))
    )
    if torch.compiler.is_compiling():
        scaled.sub_(bases.unsqueeze(-1))  # this is the front of `rows`, see `_scaled`
    else:
        torch.sub(scaled, bases.unsqueeze(-1), out=rows[..., : scaled.shape[-1]])
    rows.mul_(LOG2_E)
    return dropped


def _masked_sum(rows: Tensor, width: int, dropped: Tensor | None) -> Tensor:
    """Set masked entries and the padding past `width` to 0, then sum the rows."""
    if dropped is not None:
        masses = rows[..., :width]
        masses.addcmul_(masses, dropped, value=-1)
    if rows.shape[-1] > width:
        rows[..., width:].zero_()
    return row_sum(rows)


def logsumexp_of(tops: Tensor, sums: Tensor) -> Tensor:
    """Return log-sum-exps of rows from their maxima and sums.

    An invalid row gets its maximum (NaN, +inf or -inf).
    """
    return torch.where(sums > 0, sums.log() + tops, tops)


def _write_masses_sparsely(rows: Tensor, logits: Tensor, warp: Warp) -> tuple[Tensor, Tensor]:
    """Write the same bits as `write_masses`, but compute only the kept pieces."""
    kept = _kept_masses(logits, warp)
    if kept is None:
        return write_masses(rows, logits, warp)
    torch.unflatten(rows.zero_(), -1, (-1, PIECE_SIZE))[kept.pieces.indices] = kept.masses
    return kept.tops, _sum_of_kept(kept)


def _sum_of_kept(kept: KeptMasses) -> Tensor:
    """Sum rows from their pieces, in the order of `row_sum`."""
    sums = kept.pieces.scatter(kept.masses.sum(-1))
    return torch.nn.functional.pad(sums, (0, -sums.shape[-1] % (TILE_SIZE // PIECE_SIZE))).sum(-1)


def row_masses(logits: Tensor, warp: Warp = PLAIN) -> Masses:
    """Compute the masses of logits [B, ..., V], any float dtype, in new memory.

    exp2 takes half the time of exp on a CPU (V = 151,936, AVX2), but uses another routine for the
    remainder after the last full vector. Rows padded to tiles have no remainder if threads split
    them evenly, so the bits of an entry do not depend on its position. With an odd number of
    threads, such as 3, the last bit differs in one of 50,000 entries.
    """
    rows = padded_like(logits)
    parts = [
        _write_masses_sparsely(rows[chunk], logits[chunk], warp_of(warp, chunk))
        for chunk in chunks(logits)
    ]
    tops, sums = (
        parts[0] if len(parts) == 1 else (torch.cat(column) for column in zip(*parts, strict=True))
    )
    return Masses(rows[..., : logits.shape[-1]], sums, logsumexp_of(tops, sums))


def row_sums(logits: Tensor, warp: Warp = PLAIN) -> Sums:
    """Compute log-sum-exps of logits [B, ..., V], bitwise equal to those of `row_masses`."""
    kept = _kept_masses(logits, warp)
    if kept is not None:
        return Sums(logsumexp_of(kept.tops, _sum_of_kept(kept)), kept.pieces)
    parts = [
        logsumexp_of(*write_masses(padded_like(logits[chunk]), logits[chunk], warp_of(warp, chunk)))
        for chunk in chunks(logits)
    ]
    return Sums(parts[0] if len(parts) == 1 else torch.cat(parts), full_rows(logits))


def masses_and_exponents(logits: Tensor, warp: Warp) -> tuple[Masses, Tensor]:
    """Compute `row_masses`, and log2 of the masses [..., W], masked, both in new memory."""
    exponents = padded_like(logits)
    tops, dropped = _write_exponents(exponents, logits, warp)
    rows = exponents.exp2()
    sums = _masked_sum(rows, logits.shape[-1], dropped)
    return Masses(rows[..., : logits.shape[-1]], sums, logsumexp_of(tops, sums)), exponents
