"""Sample with the exponential race, the argmax of weight / exponential noise.

The race is equivalent to the Gumbel-max trick.
"""

import torch
from torch import Tensor

from ..noise import exponentials_of, states
from ..types import NoiseKeys, Stream
from .pieces import Pieces, nonzero_pieces
from .rows import chunks, first_argmax


def race(
    weights: Tensor, pieces: Pieces, keys: NoiseKeys, stream: Stream, position_offsets: Tensor
) -> Tensor:
    """Sample one index per row with probability proportional to its weight. Overwrites `weights`.

    The noise depends on the token id, so the sample does not depend on the choice of pieces, as
    long as they contain all positive weights.

    Args:
        weights: [P, S] float32, unnormalised probabilities of the pieces. The result is some index
            in range for a row with a NaN or without a positive weight.
        pieces: positions of the weights in rows [B, ..., V].
        keys: [B] int64 each.
        stream: random number stream.
        position_offsets: int64, broadcastable to [B, ...].

    Returns:
        [B, ...] int64.
    """
    state = states(keys, stream, position_offsets).expand(pieces.shape[:-1])
    scores = weights.div_(
        exponentials_of(pieces.expand(state).unsqueeze(-1), pieces.token_ids(weights.device))
    )
    if pieces.indices is None:
        return first_argmax(scores).view(pieces.shape[:-1])
    best = pieces.scatter(scores.amax(-1)).argmax(-1, keepdim=True)
    inside = pieces.scatter(scores.argmax(-1)).gather(-1, best)
    return torch.add(inside, best, alpha=pieces.size).squeeze(-1)


def race_rows(weights: Tensor, keys: NoiseKeys, stream: Stream, position_offsets: Tensor) -> Tensor:
    """Sample like `race`, for full rows of weights [B, ..., V]. Overwrites `weights`."""
    offsets = position_offsets.expand(weights.shape[:-1])
    parts = []
    for chunk in chunks(weights):
        pieces = nonzero_pieces(weights[chunk])
        chunk_keys = NoiseKeys(*(key[chunk] for key in keys))
        parts.append(
            race(pieces.gather(weights[chunk]), pieces, chunk_keys, stream, offsets[chunk])
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)
