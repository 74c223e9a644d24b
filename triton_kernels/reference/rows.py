"""What the twins ask of single rows of logits; each answer depends on its row alone, bit for bit."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Warp
from ..noise import exponentials
from ..types import NoiseKeys, Status, Stream

# torch.argmax takes about 1 ns an element on a CPU and a block-wise maximum a twentieth (V = 151,936).
BLOCK_SIZE = 512
# With fewer entries one argmax is cheaper than the ten small operations of the block-wise one.
MIN_BLOCKED_NUMEL = 1 << 17
# Rows wider than this are padded to a multiple of it; eight are the smallest sum that torch gives to several threads.
TILE_SIZE = 4096
# Narrower rows are padded to a multiple of two vectors of the widest CPU.
VECTOR_SIZE = 32
LOG2_E = 1.4426950408889634
PLAIN = Warp()
# Entries per thread, 2 MB: what is written stays in a core's caches until it is read again (2 cores of an AMD EPYC).
CHUNK_NUMEL = 1 << 19
# What a cutoff leaves of a row is looked for in pieces of this size, and worth it up to this share of the pieces.
PIECE_SIZE = 128
MAX_KEPT_SHARE = 0.25


class FirstMax(NamedTuple):
    """The largest entry of every row."""

    values: Tensor  # [...] float32
    indices: Tensor  # [...] int64, the lowest index of that value


class Masses(NamedTuple):
    """The law of every row, before it is normalised."""

    masses: Tensor  # [..., V] float32, exp(x - max)
    sums: Tensor  # [...] float32, of the masses
    logsumexp: Tensor  # [...] float32; NaN, -inf or +inf where a NaN, nothing but -inf, or a +inf leaves no law


def scale(logits: Tensor, temperature: float | Tensor, out: Tensor) -> Tensor:
    """`logits` [B, ...] over the temperature (a float > 0, or [B] >= 0, zeros change nothing) into `out`."""
    divisor: float | Tensor = temperature
    if isinstance(temperature, Tensor):
        divisor = temperature.to(torch.float32).view((-1,) + (1,) * (logits.dim() - 1))
        divisor = torch.where(divisor == 0, 1.0, divisor)
    elif temperature == 1.0:
        return out.copy_(logits)
    if logits.dtype == torch.float32:
        return torch.div(logits, divisor, out=out)
    return out.copy_(logits).div_(divisor)


def logits_at(logits: Tensor, warp: Warp, token_ids: Tensor) -> Tensor:
    """Logits [B, K] of the law at `token_ids` [B, K], -inf where a cutoff drops them, from raw ones [B, K, V]."""
    raw = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    found = scale(raw, warp.temperature, torch.empty(raw.shape, dtype=torch.float32, device=raw.device))
    if warp.row_cutoffs is None:
        return found
    return found.masked_fill_(found < warp.row_cutoffs[:, : found.shape[1]].to(torch.float32), -torch.inf)


def first_argmax(logits: Tensor) -> Tensor:
    """Lowest index of the largest entry in float32; a NaN counts as the largest, as for torch.argmax.

    Args:
        logits: [..., V], any float dtype and strides; V >= 1.

    Returns:
        [...] int64.
    """
    width = logits.shape[-1]
    if width < BLOCK_SIZE or logits.numel() < MIN_BLOCKED_NUMEL:
        return logits.to(torch.float32).argmax(-1)
    num_full = width // BLOCK_SIZE
    peaks = torch.unflatten(logits[..., : num_full * BLOCK_SIZE], -1, (num_full, BLOCK_SIZE)).amax(-1)
    if width % BLOCK_SIZE:
        peaks = torch.cat((peaks, logits[..., num_full * BLOCK_SIZE :].amax(-1, keepdim=True)), dim=-1)
    starts = peaks.to(torch.float32).argmax(-1) * BLOCK_SIZE
    inside = torch.arange(BLOCK_SIZE, device=logits.device)
    block = logits.gather(-1, (starts.unsqueeze(-1) + inside).clamp_(max=width - 1))  # [..., BLOCK_SIZE]
    return block.to(torch.float32).argmax(-1).add_(starts)


def first_max(logits: Tensor) -> FirstMax:
    """Largest entry in float32 and its lowest index, as `first_argmax` finds it."""
    indices = first_argmax(logits)
    return FirstMax(logits.gather(-1, indices.unsqueeze(-1)).squeeze(-1).to(torch.float32), indices)


def row_sum(terms: Tensor) -> Tensor:
    """Sum of rows [..., W] float32 that `padded_like` made, in an order that depends on W alone.

    torch splits a lone row among threads, and the sums inside its softmax lose two digits at V = 50,257.
    """
    if terms.shape[-1] <= TILE_SIZE:
        return terms.sum(-1)
    return torch.unflatten(terms, -1, (-1, TILE_SIZE)).sum(-1).sum(-1)


def padded_like(law: Tensor) -> Tensor:
    """Fresh contiguous rows [..., W] float32, W >= V a whole number of tiles; entries past V are 0."""
    width = law.shape[-1]
    unit = TILE_SIZE if width > TILE_SIZE else VECTOR_SIZE
    rows = law.new_empty((*law.shape[:-1], -(-width // unit) * unit), dtype=torch.float32)
    if rows.shape[-1] > width:
        rows[..., width:].zero_()
    return rows


def chunks(logits: Tensor) -> list[slice]:
    """Batch rows of `logits` [B, ..., V] to work on at a time: on a CPU as many as its caches hold, and at least one.

    No bit changes: every answer depends on its row alone.
    """
    num_rows = logits.shape[0]
    limit = CHUNK_NUMEL * torch.get_num_threads()
    if logits.device.type != "cpu" or logits.numel() <= limit:
        return [slice(0, num_rows)]
    size = max(limit * num_rows // logits.numel(), 1)
    return [slice(begin, begin + size) for begin in range(0, num_rows, size)]


def warp_of(warp: Warp, rows: slice) -> Warp:
    """What acts on some rows of the batch."""
    temperature, cutoffs = warp
    return Warp(
        temperature[rows] if isinstance(temperature, Tensor) else temperature,
        None if cutoffs is None else cutoffs[rows],
    )


def _fill(rows: Tensor, logits: Tensor, warp: Warp) -> tuple[Tensor, Tensor | None]:
    """Write binary exponents of the masses into `rows` that `padded_like` made; the tops, and 1.0 where to drop.

    A comparison into floats with a multiplication later takes a tenth of the time of a mask of bools and its
    filling on a CPU (V = 151,936).
    """
    law = scale(logits, warp.temperature, rows[..., : logits.shape[-1]])
    tops = law.amax(-1)
    dropped = None
    if warp.row_cutoffs is not None:
        cutoffs = warp.row_cutoffs.to(torch.float32)
        dropped = torch.lt(law, cutoffs.unsqueeze(-1), out=torch.empty_like(law))
        tops.masked_fill_(tops < cutoffs, -torch.inf)
    law.sub_(tops.unsqueeze(-1))
    rows.mul_(LOG2_E)
    return tops, dropped


def _in_pieces(rows: Tensor) -> Tensor | None:
    """`rows` [..., V] as [..., N, PIECE_SIZE], where V allows it; on a CPU, for the host must know the pieces."""
    if rows.device.type != "cpu" or rows.shape[-1] % PIECE_SIZE or rows.shape[-1] <= TILE_SIZE:
        return None
    return torch.unflatten(rows, -1, (-1, PIECE_SIZE))


def _weigh_kept(rows: Tensor, logits: Tensor, warp: Warp) -> tuple[Tensor, Tensor] | None:
    """As `_weigh`, bit for bit, from the pieces that the cutoffs leave something of; None where they leave too much."""
    pieces = _in_pieces(logits)
    if pieces is None or warp.row_cutoffs is None:
        return None
    cutoffs = warp.row_cutoffs.to(torch.float32)
    peaks = pieces.amax(-1)  # dividing keeps their order
    peaks = scale(peaks, warp.temperature, torch.empty(peaks.shape, dtype=torch.float32))
    tops = peaks.amax(-1)
    is_kept = (peaks < cutoffs.unsqueeze(-1)).logical_not_()
    is_lawful = (tops.abs() < torch.inf) & ~(tops < cutoffs)
    if not is_lawful.all() or is_kept.sum() > MAX_KEPT_SHARE * is_kept.numel():
        return None
    index = is_kept.nonzero(as_tuple=True)
    row = index[:-1]
    temperature = warp.temperature[row[0]] if isinstance(warp.temperature, Tensor) else warp.temperature
    kept = pieces[index]  # [P, PIECE_SIZE]
    kept = scale(kept, temperature, torch.empty(kept.shape, dtype=torch.float32))
    dropped = kept < cutoffs[row].unsqueeze(-1)
    kept.sub_(tops[row].unsqueeze(-1)).mul_(LOG2_E).exp2_().masked_fill_(dropped, 0.0)
    torch.unflatten(rows.zero_(), -1, (-1, PIECE_SIZE))[index] = kept
    return tops, row_sum(rows)


def _weigh(rows: Tensor, logits: Tensor, warp: Warp) -> tuple[Tensor, Tensor]:
    """Write the masses into `rows` that `padded_like` made; tops and sums."""
    kept = _weigh_kept(rows, logits, warp)
    if kept is not None:
        return kept
    tops, dropped = _fill(rows, logits, warp)
    return tops, _sum(rows.exp2_(), logits.shape[-1], dropped)


def _sum(rows: Tensor, width: int, dropped: Tensor | None) -> Tensor:
    """Take the padding past `width` and the dropped entries out of masses, and sum what is left."""
    if dropped is not None:
        masses = rows[..., :width]
        masses.addcmul_(masses, dropped, value=-1)
    if rows.shape[-1] > width:
        rows[..., width:].zero_()
    return row_sum(rows)


def row_masses(logits: Tensor, warp: Warp = PLAIN) -> Masses:
    """Weigh the entries of rows of logits [B, ..., V], any float dtype; the answer is fresh memory.

    exp2 takes half of exp's time on a CPU (V = 151,936, AVX2), but the entries that fill no whole vector come from
    another routine. Whole tiles leave none where the threads split the rows evenly, so an entry's bits do not depend
    on where it lies; in one entry of 50,000 the last bit does with, say, 3 threads.
    """
    rows = padded_like(logits)
    parts = [_weigh(rows[chunk], logits[chunk], warp_of(warp, chunk)) for chunk in chunks(logits)]
    tops, sums = parts[0] if len(parts) == 1 else (torch.cat(column) for column in zip(*parts, strict=True))
    return Masses(rows[..., : logits.shape[-1]], sums, torch.where(sums > 0, sums.log() + tops, tops))


def row_logsumexp(logits: Tensor) -> Tensor:
    """Log-sum-exps of rows of logits [B, ..., V]: as `row_masses`, without keeping the masses."""
    parts = [row_masses(logits[chunk]).logsumexp for chunk in chunks(logits)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def masses_and_exponents(logits: Tensor, warp: Warp) -> tuple[Masses, Tensor]:
    """As `row_masses`, and binary exponents [..., W] of the masses, dropped entries too; both fresh memory."""
    exponents = padded_like(logits)
    tops, dropped = _fill(exponents, logits, warp)
    rows = exponents.exp2()
    sums = _sum(rows, logits.shape[-1], dropped)
    return Masses(rows[..., : logits.shape[-1]], sums, torch.where(sums > 0, sums.log() + tops, tops)), exponents


def law_status(logsumexp: Tensor) -> Tensor:
    """Flags of rows by their log-sum-exp, or their maximum (any shape), int32; 0 for a row with a law."""
    flags = logsumexp.masked_fill(logsumexp.abs() < torch.inf, 0.0)
    flags.nan_to_num_(nan=float(Status.NAN), posinf=float(Status.POSITIVE_INF), neginf=float(Status.ALL_MASKED))
    return flags.to(torch.int32)


def pick_rows(tensor: Tensor, positions: Tensor) -> Tensor:
    """Row `positions[b]` of every batch row: [B, N, V] and [B] int64 -> [B, V], in the dtype it has; fresh memory."""
    rows = torch.arange(tensor.shape[0], device=tensor.device)
    if tensor.stride(0) == tensor.shape[1] * tensor.stride(1):
        # Whole rows are copied five times as fast as indexed entries.
        return tensor.flatten(0, 1).index_select(0, torch.add(positions, rows, alpha=tensor.shape[1]))
    return tensor[rows, positions]


def _divide(weights: Tensor, keys: NoiseKeys, stream: Stream, offsets: Tensor) -> Tensor:
    """Divide `weights` [B, ..., V] by their exponential clocks, in place; `offsets` [B, ...].

    Noise belongs to a token, so pieces without a positive weight need none.
    """
    pieces = _in_pieces(weights)
    if pieces is not None:
        is_live = (pieces.amax(-1) <= 0).logical_not_()  # a NaN is alive
        if is_live.sum() <= MAX_KEPT_SHARE * is_live.numel():
            index = is_live.nonzero(as_tuple=True)
            inside = torch.arange(PIECE_SIZE, dtype=torch.int32)
            token_ids = index[-1].to(torch.int32).unsqueeze(-1) * PIECE_SIZE + inside  # [P, PIECE_SIZE]
            clocks = exponentials(keys.rows(index[0]), stream, offsets[index[:-1]].unsqueeze(-1), token_ids)
            pieces[index] = pieces[index].div_(clocks)
            return weights
    token_ids = torch.arange(weights.shape[-1], dtype=torch.int32, device=weights.device)
    return weights.div_(exponentials(keys, stream, offsets.unsqueeze(-1), token_ids))


def race(weights: Tensor, keys: NoiseKeys, stream: Stream, position_offsets: Tensor) -> Tensor:
    """Draw one index a row: the first arrival of exponential clocks with these rates. Overwrites `weights`.

    Args:
        weights: [B, ..., V] float32 rates, >= 0 where the law is; need not sum to 1. A row without a positive rate, or
            with a NaN, gives some index in range.
        keys: [B] int64 each.
        stream: which noise.
        position_offsets: [B, ...] int64, or of a shape that broadcasts to it.

    Returns:
        [B, ...] int64.
    """
    offsets = position_offsets.expand(weights.shape[:-1])
    parts = [
        first_argmax(_divide(weights[chunk], NoiseKeys(*(key[chunk] for key in keys)), stream, offsets[chunk]))
        for chunk in chunks(weights)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
