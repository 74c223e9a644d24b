"""The exponentials of rows of logits, with their sums; each answer depends on its row alone, bit for bit."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Warp
from .pieces import Pieces, kept_pieces, whole
from .rows import PIECE_SIZE, PLAIN, TILE_SIZE, chunks, padded_like, row_sum, scale, warp_of

LOG2_E = 1.4426950408889634


class Masses(NamedTuple):
    """The law of every row, before it is normalised."""

    masses: Tensor  # [..., V] float32, exp(x - max)
    sums: Tensor  # [...] float32, of the masses
    logsumexp: Tensor  # [...] float32; NaN, -inf or +inf where a NaN, nothing but -inf, or a +inf leaves no law


class Sums(NamedTuple):
    """What a law is normalised by."""

    logsumexp: Tensor  # [...] float32, as in `Masses`
    pieces: Pieces  # where the law is


class Kept(NamedTuple):
    """The pieces of rows that have an entry in the law."""

    pieces: Pieces
    masses: Tensor  # [P, S] float32
    tops: Tensor  # [...] float32, the largest logit of every row


def exponentials_at(pieces: Pieces, raw: Tensor, warp: Warp, bases: Tensor) -> Tensor:
    """exp(x - base), [P, S] float32 in fresh memory; 0 for what the warp drops.

    Args:
        pieces: of logits [B, ..., V].
        raw: [P, S], what lies there.
        warp: what acts on them.
        bases: [B, ...] float32; the log-sum-exps give probabilities.
    """
    rows = padded_like(raw)
    temperature = warp.temperature
    if isinstance(temperature, Tensor):
        leading = pieces.shape[:-1]
        temperature = pieces.spread(temperature.view((-1,) + (1,) * (len(leading) - 1)).expand(leading))
    law = scale(raw, temperature, rows[..., : raw.shape[-1]])
    cutoffs = None if warp.row_cutoffs is None else pieces.spread(warp.row_cutoffs.to(torch.float32))
    dropped = _to_exponents(rows, law, cutoffs, pieces.spread(bases))
    rows.exp2_()
    return law if dropped is None else law.addcmul_(law, dropped, value=-1)


def _weigh_kept(logits: Tensor, warp: Warp) -> Kept | None:
    """Weigh the pieces that cutoffs or -inf leave something of; None where they leave too much."""
    pieces, tops = kept_pieces(logits, warp)
    return None if tops is None else Kept(pieces, exponentials_at(pieces, pieces.of(logits), warp, tops), tops)


def weigh_all(rows: Tensor, logits: Tensor, warp: Warp) -> tuple[Tensor, Tensor]:
    """Write the masses into `rows` that `padded_like` made; tops and sums."""
    tops, dropped = _fill(rows, logits, warp)
    return tops, _sum(rows.exp2_(), logits.shape[-1], dropped)


def _fill(rows: Tensor, logits: Tensor, warp: Warp) -> tuple[Tensor, Tensor | None]:
    """Write binary exponents of the masses into `rows` that `padded_like` made; the tops, and 1.0 where to drop."""
    law = scale(logits, warp.temperature, rows[..., : logits.shape[-1]])
    tops = law.amax(-1)
    cutoffs = None if warp.row_cutoffs is None else warp.row_cutoffs.to(torch.float32)
    if cutoffs is not None:
        tops.masked_fill_(tops < cutoffs, -torch.inf)
    return tops, _to_exponents(rows, law, cutoffs, tops)


def _to_exponents(rows: Tensor, law: Tensor, cutoffs: Tensor | None, bases: Tensor) -> Tensor | None:
    """Turn `law` [..., V], the front of `rows` [..., W], into binary exponents of exp(x - base); 1.0 where to drop.

    A comparison into floats with a multiplication later takes a tenth of the time of a mask of bools and its
    filling on a CPU (V = 151,936).
    """
    dropped = None if cutoffs is None else torch.lt(law, cutoffs.unsqueeze(-1), out=torch.empty_like(law))
    law.sub_(bases.unsqueeze(-1))
    rows.mul_(LOG2_E)
    return dropped


def _sum(rows: Tensor, width: int, dropped: Tensor | None) -> Tensor:
    """Take the padding past `width` and the dropped entries out of masses, and sum what is left."""
    if dropped is not None:
        masses = rows[..., :width]
        masses.addcmul_(masses, dropped, value=-1)
    if rows.shape[-1] > width:
        rows[..., width:].zero_()
    return row_sum(rows)


def logsumexp_of(tops: Tensor, sums: Tensor) -> Tensor:
    """Log-sum-exps of rows; where a +inf or a NaN makes the sum a NaN, the top says which."""
    return torch.where(sums > 0, sums.log() + tops, tops)


def _weigh(rows: Tensor, logits: Tensor, warp: Warp) -> tuple[Tensor, Tensor]:
    """As `weigh_all`, bit for bit, with less work where little is kept."""
    kept = _weigh_kept(logits, warp)
    if kept is None:
        return weigh_all(rows, logits, warp)
    torch.unflatten(rows.zero_(), -1, (-1, PIECE_SIZE))[kept.pieces.where] = kept.masses
    return kept.tops, _sum_of_kept(kept)


def _sum_of_kept(kept: Kept) -> Tensor:
    """Sums of rows from their pieces, as `row_sum` adds them."""
    sums = kept.pieces.collect(kept.masses.sum(-1))
    return torch.nn.functional.pad(sums, (0, -sums.shape[-1] % (TILE_SIZE // PIECE_SIZE))).sum(-1)


def row_masses(logits: Tensor, warp: Warp = PLAIN) -> Masses:
    """Weigh the entries of rows of logits [B, ..., V], any float dtype; the answer is fresh memory.

    exp2 takes half of exp's time on a CPU (V = 151,936, AVX2), but the entries that fill no whole vector come from
    another routine. Whole tiles leave none where the threads split the rows evenly, so an entry's bits do not depend
    on where it lies; in one entry of 50,000 the last bit does with, say, 3 threads.
    """
    rows = padded_like(logits)
    parts = [_weigh(rows[chunk], logits[chunk], warp_of(warp, chunk)) for chunk in chunks(logits)]
    tops, sums = parts[0] if len(parts) == 1 else (torch.cat(column) for column in zip(*parts, strict=True))
    return Masses(rows[..., : logits.shape[-1]], sums, logsumexp_of(tops, sums))


def row_sums(logits: Tensor, warp: Warp = PLAIN) -> Sums:
    """Log-sum-exps of rows of logits [B, ..., V]: as `row_masses`, bit for bit, without keeping the masses."""
    kept = _weigh_kept(logits, warp)
    if kept is not None:
        return Sums(logsumexp_of(kept.tops, _sum_of_kept(kept)), kept.pieces)
    parts = [
        logsumexp_of(*weigh_all(padded_like(logits[some]), logits[some], warp_of(warp, some)))
        for some in chunks(logits)
    ]
    return Sums(parts[0] if len(parts) == 1 else torch.cat(parts), whole(logits))


def masses_and_exponents(logits: Tensor, warp: Warp) -> tuple[Masses, Tensor]:
    """As `row_masses`, and binary exponents [..., W] of the masses, dropped entries too; both fresh memory."""
    exponents = padded_like(logits)
    tops, dropped = _fill(exponents, logits, warp)
    rows = exponents.exp2()
    sums = _sum(rows, logits.shape[-1], dropped)
    return Masses(rows[..., : logits.shape[-1]], sums, logsumexp_of(tops, sums)), exponents
