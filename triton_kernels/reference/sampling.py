"""The torch twin of drawing one token a row."""

import torch
from torch import Tensor

from .._inputs import Warp
from ..types import NoiseKeys, Sampled, Stream
from .masses import row_masses
from .races import race_rows
from .rows import first_max


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
