"""Operations on rows of logits: argmax, sum, temperature, chunking.

Each row's result depends only on its own entries.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .._inputs import Warp
from ..types import Status

# Wider rows are padded to a multiple of this. From eight tiles on, torch splits a sum between
# threads.
TILE_SIZE = 4096
# Narrower rows are padded to a multiple of two vectors of the widest CPU.
VECTOR_SIZE = 32
PLAIN = Warp()
# Python numbers, because torch.compile cannot trace the conversion of an enum.
STATUS_FLAGS = {
    "nan": float(Status.NAN),
    "posinf": float(Status.POSITIVE_INF),
    "neginf": float(Status.ALL_MASKED),
}
# Entries per thread; 2 MB stay in a core's cache between operations (2 cores of an AMD EPYC).
CHUNK_NUMEL = 1 << 19
# Wide rows are summed, and searched for unmasked entries, in pieces of this size.
PIECE_SIZE = 128


class FirstMax(NamedTuple):
    """The largest entry of every row."""

    values: Tensor  # [...] float32
    indices: Tensor  # [...] int64, the lowest index with this value


def scale(logits: Tensor, temperature: float | Tensor, out: Tensor) -> Tensor:
    """Write `logits` [B, ...] / temperature into `out`.

    Args:
        logits: [B, ...], any float dtype.
        temperature: a float > 0, or [B] >= 0 with 0 treated as 1.
        out: float32, the shape of the logits.
    """
    divisor: float | Tensor = temperature
    if isinstance(temperature, Tensor):
        divisor = temperature.to(torch.float32).view((-1,) + (1,) * (logits.dim() - 1))
        divisor = torch.where(divisor == 0, 1.0, divisor)
    elif temperature == 1.0:
        return out.copy_(logits)
    # A compiler does not accept a slice of another tensor as `out`.
    if logits.dtype == torch.float32 and not torch.compiler.is_compiling():
        return torch.div(logits, divisor, out=out)
    return out.copy_(logits).div_(divisor)


def logits_at(logits: Tensor, warp: Warp, token_ids: Tensor) -> Tensor:
    """Return the logits of `token_ids` [B, K] after temperature and cutoffs, [B, K] float32.

    The raw logits are [B, K, V].
    """
    raw = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    if isinstance(warp.temperature, Tensor) or warp.temperature != 1.0:
        scaled = scale(
            raw, warp.temperature, torch.empty(raw.shape, dtype=torch.float32, device=raw.device)
        )
    else:
        scaled = raw.to(torch.float32)
    if warp.row_cutoffs is None:
        return scaled
    return scaled.masked_fill_(
        scaled < warp.row_cutoffs[:, : scaled.shape[1]].to(torch.float32), -torch.inf
    )


def first_argmax(logits: Tensor) -> Tensor:
    """Return the lowest index of the largest entry of [..., V] in float32, [...] int64.

    NaN counts as the largest entry.
    """
    entries = logits.detach().to(torch.float32)
    if not is_on_host(entries):
        return entries.argmax(-1)
    # This takes at most a fifth of the time of torch.argmax (V = 4,096 and 151,936), and breaks
    # ties in the same way.
    return torch.from_numpy(entries.numpy().argmax(-1))


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor may be read without torch's operators.

    It is on the CPU, and nothing records operators.
    """
    is_observed = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not is_observed


def first_max(logits: Tensor) -> FirstMax:
    """Return the largest entry in float32 and its lowest index, see `first_argmax`."""
    indices = first_argmax(logits)
    return FirstMax(logits.gather(-1, indices.unsqueeze(-1)).squeeze(-1).to(torch.float32), indices)


def row_sum(terms: Tensor) -> Tensor:
    """Sum rows [..., W] float32 from `padded_like`, in an order that depends only on W.

    `sum(-1)` splits a single row between threads, and the sums inside torch's softmax lose two
    digits at V = 50,257.
    """
    if terms.shape[-1] <= TILE_SIZE:
        return terms.sum(-1)
    return torch.unflatten(terms, -1, (-1, PIECE_SIZE)).sum(-1).sum(-1)


def padded_like(logits: Tensor) -> Tensor:
    """Allocate contiguous rows [..., W] float32, with entries past V set to 0.

    W >= V is a multiple of the tile size.
    """
    width = logits.shape[-1]
    unit = TILE_SIZE if width > TILE_SIZE else VECTOR_SIZE
    rows = logits.new_empty((*logits.shape[:-1], -(-width // unit) * unit), dtype=torch.float32)
    if rows.shape[-1] > width:
        rows[..., width:].zero_()
    return rows


def chunks(logits: Tensor) -> list[slice]:
    """Split the batch rows of `logits` [B, ..., V] into slices that fit into the CPU caches.

    On other devices, one slice holds all rows.
    """
    if torch.compiler.is_compiling() or logits.device.type != "cpu":
        # A slice with bounds would specialise a compiled graph to its batch size.
        return [slice(None)]
    num_rows = logits.shape[0]
    limit = CHUNK_NUMEL * torch.get_num_threads()
    if logits.numel() <= limit:
        return [slice(None)]
    size = max(limit * num_rows // logits.numel(), 1)
    return [slice(begin, begin + size) for begin in range(0, num_rows, size)]


def warp_of(warp: Warp, rows: slice) -> Warp:
    """Return the temperature and cutoffs of the batch rows in a slice."""
    temperature, cutoffs = warp
    return Warp(
        temperature[rows] if isinstance(temperature, Tensor) else temperature,
        None if cutoffs is None else cutoffs[rows],
    )


def row_status(logsumexp: Tensor) -> Tensor:
    """Return `Status` flags of rows, int32; 0 for a valid row.

    Args:
        logsumexp: log-sum-exps or maxima of any shape.
    """
    if is_on_host(logsumexp) and all(map(math.isfinite, logsumexp.flatten().tolist())):
        # This takes a quarter of the time of the operators below.
        return torch.zeros(logsumexp.shape, dtype=torch.int32, device="cpu")
    flags = logsumexp.masked_fill(logsumexp.abs() < torch.inf, 0.0)
    flags.nan_to_num_(**STATUS_FLAGS)
    return flags.to(torch.int32)


def warp_at(warp: Warp, positions: Tensor) -> Warp:
    """Return the temperature and cutoffs of row `positions[b]` [B] int64 in every batch row."""
    if warp.row_cutoffs is None:
        return warp
    return Warp(warp.temperature, warp.row_cutoffs.gather(1, positions.unsqueeze(-1)).squeeze(-1))


def pick_rows(tensor: Tensor, positions: Tensor) -> Tensor:
    """Pick row `positions[b]` of every batch row: [B, N, V], [B] int64 -> [B, V] in new memory."""
    rows = torch.arange(tensor.shape[0], device=tensor.device)
    if tensor.stride(0) == tensor.shape[1] * tensor.stride(1):
        # index_select is five times as fast as advanced indexing.
        return tensor.flatten(0, 1).index_select(
            0, torch.add(positions, rows, alpha=tensor.shape[1])
        )
    return tensor[rows, positions]
