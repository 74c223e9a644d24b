"""The torch twin of drawing one token a row."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Warp
from ..types import NoiseKeys, Sampled, Stream
from .masses import logsumexp_of, row_masses, weigh_all
from .races import race_rows
from .rows import PLAIN, first_argmax, first_max, padded_like


class Drawn(NamedTuple):
    """One of several draws a row, before their log-sum-exps are made together."""

    token_ids: Tensor  # [B] int64
    tops: Tensor  # [B] float32, the largest logits
    sums: Tensor  # [B] float32, of exp(x - top)


def sample(logits: Tensor, warp: Warp, keys: NoiseKeys, stream: Stream) -> Sampled:
    """See the public `sample`."""
    if warp.is_greedy:
        best = first_max(logits)
        return Sampled(best.indices, best.values)
    masses, _, logsumexp = row_masses(logits, warp)
    token_ids = race_rows(masses, keys, stream, torch.zeros(1, dtype=torch.int64, device=logits.device))
    if not isinstance(warp.temperature, Tensor):
        return Sampled(token_ids, logsumexp)
    best = first_max(logits)
    argmax_rows = warp.temperature == 0
    return Sampled(torch.where(argmax_rows, best.indices, token_ids), torch.where(argmax_rows, best.values, logsumexp))


def draw(logits: Tensor, clocks: Tensor) -> Drawn:
    """As `sample` without a warp, bit for bit, with noise made before.

    Args:
        logits: [B, V].
        clocks: [B, V] float32, the exponential numbers of the draw.
    """
    rows = padded_like(logits)
    tops, sums = weigh_all(rows, logits, PLAIN)
    return Drawn(first_argmax(rows[..., : logits.shape[-1]].div_(clocks)), tops, sums)


def logsumexps(drawn: Sequence[Drawn]) -> Tensor:
    """Of all rows drawn from, [B, N] float32."""
    tops, sums = (torch.stack([getattr(one, name) for one in drawn], dim=1) for name in ("tops", "sums"))
    return logsumexp_of(tops, sums)
