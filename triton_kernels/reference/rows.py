"""What the twins ask of single rows of logits; each answer depends on its row alone, bit for bit."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Warp
from ..types import Status

# torch.argmax takes about 1 ns an element on a CPU and a block-wise maximum a twentieth (V = 151,936).
BLOCK_SIZE = 512
# With fewer entries one argmax is cheaper than the ten small operations of the block-wise one.
MIN_BLOCKED_NUMEL = 1 << 17
# Rows wider than this are padded to a multiple of it; eight are the smallest sum that torch gives to several threads.
TILE_SIZE = 4096
# Narrower rows are padded to a multiple of two vectors of the widest CPU.
VECTOR_SIZE = 32
PLAIN = Warp()
# Plain numbers: torch.compile cannot follow the enum's conversion.
LAWLESS = {
    "nan": float(Status.NAN),
    "posinf": float(Status.POSITIVE_INF),
    "neginf": float(Status.ALL_MASKED),
}
# Entries per thread, 2 MB: what is written stays in a core's caches until it is read again (2 cores of an AMD EPYC).
CHUNK_NUMEL = 1 << 19
# Wide rows are summed, and what a cutoff leaves of them is looked for, in pieces of this size.
PIECE_SIZE = 128


class FirstMax(NamedTuple):
    """The largest entry of every row."""

    values: Tensor  # [...] float32
    indices: Tensor  # [...] int64, the lowest index of that value


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
    return torch.unflatten(terms, -1, (-1, PIECE_SIZE)).sum(-1).sum(-1)


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

    No bit changes: every answer depends on its row alone. A compiler has caches in mind by itself.
    """
    if torch.compiler.is_compiling() or logits.device.type != "cpu":
        return [slice(None)]  # a bound would tie a compiled graph to its batch size
    num_rows = logits.shape[0]
    limit = CHUNK_NUMEL * torch.get_num_threads()
    if logits.numel() <= limit:
        return [slice(None)]
    size = max(limit * num_rows // logits.numel(), 1)
    return [slice(begin, begin + size) for begin in range(0, num_rows, size)]


def warp_of(warp: Warp, rows: slice) -> Warp:
    """What acts on some rows of the batch."""
    temperature, cutoffs = warp
    return Warp(
        temperature[rows] if isinstance(temperature, Tensor) else temperature,
        None if cutoffs is None else cutoffs[rows],
    )


def law_status(logsumexp: Tensor) -> Tensor:
    """Flags of rows by their log-sum-exp, or their maximum (any shape), int32; 0 for a row with a law."""
    flags = logsumexp.masked_fill(logsumexp.abs() < torch.inf, 0.0)
    flags.nan_to_num_(**LAWLESS)
    return flags.to(torch.int32)


def warp_at(warp: Warp, positions: Tensor) -> Warp:
    """What acts on row `positions[b]` [B] int64 of every batch row."""
    if warp.row_cutoffs is None:
        return warp
    return Warp(warp.temperature, warp.row_cutoffs.gather(1, positions.unsqueeze(-1)).squeeze(-1))


def pick_rows(tensor: Tensor, positions: Tensor) -> Tensor:
    """Row `positions[b]` of every batch row: [B, N, V] and [B] int64 -> [B, V], in the dtype it has; fresh memory."""
    rows = torch.arange(tensor.shape[0], device=tensor.device)
    if tensor.stride(0) == tensor.shape[1] * tensor.stride(1):
        # Whole rows are copied five times as fast as indexed entries.
        return tensor.flatten(0, 1).index_select(0, torch.add(positions, rows, alpha=tensor.shape[1]))
    return tensor[rows, positions]
