"""What the twins ask of single rows of logits; each answer depends on its row alone, bit for bit."""

from typing import NamedTuple

import torch
from torch import Tensor

from .noise import exponentials
from .types import NoiseKeys, Status, Stream

# torch.argmax takes about 1 ns an element on a CPU and a block-wise maximum a twentieth (V = 151,936).
BLOCK_SIZE = 512
# Below this width one argmax is cheaper than the five operations of the block-wise one.
MIN_BLOCKED_WIDTH = 8 * BLOCK_SIZE
# Eight of these are the smallest sum that torch hands to several threads.
SUM_SIZE = 4096


class FirstMax(NamedTuple):
    """The largest entry of every row."""

    values: Tensor  # [...] float32
    indices: Tensor  # [...] int64, the lowest index of that value


class Probs(NamedTuple):
    """The law of every row."""

    probs: Tensor  # [..., V] float32
    logsumexp: Tensor  # [...] float32; NaN, -inf or +inf where a NaN, nothing but -inf, or a +inf leaves no law


def to_law(logits: Tensor, temperature: float | Tensor, row_cutoffs: Tensor | None) -> Tensor:
    """Logits of the law that is drawn from, in float32; `logits` itself where nothing changes.

    Args:
        logits: [B, ..., V], any float dtype.
        temperature: > 0, or [B] >= 0; rows at 0 are left as they are.
        row_cutoffs: [B, ...]; after the temperature, entries below become -inf.

    Returns:
        [B, ..., V] float32.
    """
    law = logits.to(torch.float32)
    if isinstance(temperature, Tensor):
        divisor = temperature.to(torch.float32).view((-1,) + (1,) * (logits.dim() - 1))
        law = law / torch.where(divisor == 0, 1.0, divisor)
    elif temperature != 1.0:
        law = law / temperature
    if row_cutoffs is not None:
        law = law.masked_fill(law < row_cutoffs.to(torch.float32).unsqueeze(-1), -torch.inf)
    return law


def first_max(logits: Tensor) -> FirstMax:
    """Largest entry in float32 and its lowest index; a NaN counts as the largest, as for torch.argmax.

    Args:
        logits: [..., V], any float dtype and strides; V >= 1.
    """
    width = logits.shape[-1]
    if width < MIN_BLOCKED_WIDTH:
        logits = logits.to(torch.float32)
        indices = logits.argmax(-1, keepdim=True)
        return FirstMax(logits.gather(-1, indices).squeeze(-1), indices.squeeze(-1))
    num_full = width // BLOCK_SIZE
    peaks = logits[..., : num_full * BLOCK_SIZE].unflatten(-1, (num_full, BLOCK_SIZE)).amax(-1)
    if width % BLOCK_SIZE:
        peaks = torch.cat((peaks, logits[..., num_full * BLOCK_SIZE :].amax(-1, keepdim=True)), dim=-1)
    starts = peaks.to(torch.float32).argmax(-1, keepdim=True) * BLOCK_SIZE
    inside = torch.arange(BLOCK_SIZE, device=logits.device)
    block = logits.gather(-1, (starts + inside).clamp_(max=width - 1)).to(torch.float32)  # [..., BLOCK_SIZE]
    offsets = block.argmax(-1, keepdim=True)
    return FirstMax(block.gather(-1, offsets).squeeze(-1), (starts + offsets).squeeze(-1))


def row_probs(law: Tensor) -> Probs:
    """Probabilities and log-sum-exp of rows of logits [..., V] float32.

    The largest probability is 1 / sum(exp(x - max)): one fused pass gives both answers, in an order that does not
    depend on the number of rows, as that of torch.logsumexp does.
    """
    probs = law.softmax(-1)
    tops = law.amax(-1)
    peaks = probs.amax(-1)
    return Probs(probs, torch.where(peaks > 0, tops - peaks.log(), tops))


def law_status(logsumexp: Tensor) -> Tensor:
    """Flags of rows by their log-sum-exp, or their maximum (any shape), int32; 0 for a row with a law."""
    nan = logsumexp.isnan().to(torch.int32).mul_(int(Status.NAN))
    masked = (logsumexp == -torch.inf).to(torch.int32).mul_(int(Status.ALL_MASKED))
    return (logsumexp == torch.inf).to(torch.int32).mul_(int(Status.POSITIVE_INF)).add_(nan).add_(masked)


def row_sum(terms: Tensor) -> Tensor:
    """Sum of rows [..., V] float32, in an order that depends on V alone; torch splits a lone row among threads."""
    num_full = terms.shape[-1] // SUM_SIZE
    split = num_full * SUM_SIZE
    whole = terms[..., :split].unflatten(-1, (num_full, SUM_SIZE)).sum(-1)
    return torch.cat((whole, terms[..., split:].sum(-1, keepdim=True)), dim=-1).sum(-1)


def pick_rows(tensor: Tensor, positions: Tensor) -> Tensor:
    """Row `positions[b]` of every batch row: [B, N, V] and [B] int64 -> [B, V], in the dtype it has."""
    return tensor[torch.arange(tensor.shape[0], device=tensor.device), positions]


def race(weights: Tensor, keys: NoiseKeys, stream: Stream, position_offsets: Tensor) -> Tensor:
    """Draw one index a row: the first arrival of exponential clocks with these rates. Overwrites `weights`.

    Args:
        weights: [B, V] float32 rates, >= 0 where the law is; need not sum to 1. A row without a positive rate, or with
            a NaN, gives some index in range.
        keys: [B] int64 each.
        stream: which noise.
        position_offsets: [B] or [1] int64.

    Returns:
        [B] int64.
    """
    token_ids = torch.arange(weights.shape[-1], dtype=torch.int32, device=weights.device)
    clocks = exponentials(keys, stream, position_offsets.unsqueeze(-1), token_ids)  # [B, V]
    return first_max(weights.div_(clocks)).indices
