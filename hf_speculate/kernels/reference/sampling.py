"""Torch reference for sampling one token per row."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Warp
from ..types import NoiseKeys, Sampled, Stream
from .masses import logsumexp_of, row_masses, write_masses
from .races import race_rows
from .rows import PLAIN, first_argmax, first_max, padded_like


class Drawn(NamedTuple):
    """Sampled tokens, and the terms of their log-sum-exps."""

    token_ids: Tensor  # [B] int64
    tops: Tensor  # [B] float32, row maxima of the logits
    sums: Tensor  # [B] float32, sums of exp(x - top)


def sample(logits: Tensor, warp: Warp, keys: NoiseKeys, stream: Stream) -> Sampled:
    """See `kernels.sample`."""
    if warp.is_greedy:
        best = first_max(logits)
        return Sampled(best.indices, best.values)
    masses, _, logsumexp = row_masses(logits, warp)
    token_ids = race_rows(
        masses, keys, stream, torch.zeros(1, dtype=torch.int64, device=logits.device)
    )
    if not isinstance(warp.temperature, Tensor):
        return Sampled(token_ids, logsumexp)
    best = first_max(logits)
    argmax_rows = warp.temperature == 0
    return Sampled(
        torch.where(argmax_rows, best.indices, token_ids),
        torch.where(argmax_rows, best.values, logsumexp),
    )


def draw(logits: Tensor, noise: Tensor) -> Drawn:
    """Sample from logits [B, V] with noise [B, V] float32; bitwise equal to `sample`."""
    rows = padded_like(logits)
    tops, sums = write_masses(rows, logits, PLAIN)
    return Drawn(first_argmax(rows[..., : logits.shape[-1]].div_(noise)), tops, sums)


def logsumexps(drawn: Sequence[Drawn]) -> Tensor:
    """Compute the log-sum-exps of N draws, [B, N] float32."""
    tops, sums = (
        torch.stack([getattr(step, name) for step in drawn], dim=1) for name in ("tops", "sums")
    )
    return logsumexp_of(tops, sums)
