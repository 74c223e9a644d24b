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


class FirstMax(NamedTuple):
    """The largest entry of every row."""

    values: Tensor  # [...] float32
    indices: Tensor  # [...] int64, the lowest index of that value


class Masses(NamedTuple):
    """The law of every row, before it is normalised."""

    masses: Tensor  # [..., V] float32, exp(x - max)
    sums: Tensor  # [...] float32, of the masses
    logsumexp: Tensor  # [...] float32; NaN, -inf or +inf where a NaN, nothing but -inf, or a +inf leaves no law


def to_law(logits: Tensor, warp: Warp) -> Tensor:
    """Logits of the law that is drawn from, in float32; `logits` itself where nothing changes.

    Args:
        logits: [B, ..., V], any float dtype.
        warp: a temperature > 0, or [B] >= 0, where rows at 0 are left as they are; cutoffs [B, ...].

    Returns:
        [B, ..., V] float32.
    """
    temperature, row_cutoffs = warp
    law = logits.to(torch.float32)
    if isinstance(temperature, Tensor):
        divisor = temperature.to(torch.float32).view((-1,) + (1,) * (logits.dim() - 1))
        law = law / torch.where(divisor == 0, 1.0, divisor)
    elif temperature != 1.0:
        law = law / temperature
    if row_cutoffs is not None:
        law = law.masked_fill(law < row_cutoffs.to(torch.float32).unsqueeze(-1), -torch.inf)
    return law


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
    rows = law.new_empty((*law.shape[:-1], -(-width // unit) * unit))
    if rows.shape[-1] > width:
        rows[..., width:].zero_()
    return rows


def row_masses(law: Tensor) -> Masses:
    """Weigh the entries of rows of logits [..., V] float32; the answer is fresh memory.

    exp2 takes half of exp's time on a CPU (V = 151,936, AVX2), but the entries that fill no whole vector come from
    another routine. Whole tiles leave none where the threads split the rows evenly, so an entry's bits do not depend
    on where it lies; in one entry of 50,000 the last bit does with, say, 3 threads.
    """
    width = law.shape[-1]
    tops = law.amax(-1)
    rows = padded_like(law)
    masses = rows[..., :width]
    torch.sub(law, tops.unsqueeze(-1), out=masses)
    rows.mul_(LOG2_E).exp2_()
    if rows.shape[-1] > width:
        rows[..., width:].zero_()
    sums = row_sum(rows)
    return Masses(masses, sums, torch.where(sums > 0, sums.log() + tops, tops))


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
    token_ids = torch.arange(weights.shape[-1], dtype=torch.int32, device=weights.device)
    clocks = exponentials(keys, stream, position_offsets.unsqueeze(-1), token_ids)  # [B, ..., V]
    return first_argmax(weights.div_(clocks))
