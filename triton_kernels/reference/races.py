"""Draws from unnormalised laws by racing exponential clocks."""

import torch
from torch import Tensor

from ..noise import exponentials_of, states
from ..types import NoiseKeys, Stream
from .pieces import Pieces, live_pieces
from .rows import chunks, first_argmax


def race(weights: Tensor, pieces: Pieces, keys: NoiseKeys, stream: Stream, position_offsets: Tensor) -> Tensor:
    """Draw one index a row: the first arrival of exponential clocks with these rates. Overwrites `weights`.

    Noise belongs to a token, so what the pieces leave out needs none, and the winner is the same for all choices of
    pieces that hold every positive rate.

    Args:
        weights: [P, S] float32 rates of the pieces, >= 0 where the law is; need not sum to 1. A row without a positive
            rate, or with a NaN, gives some index in range.
        pieces: where they lie in rows [B, ..., V].
        keys: [B] int64 each.
        stream: which noise.
        position_offsets: [B, ...] int64, or of a shape that broadcasts to it.

    Returns:
        [B, ...] int64.
    """
    state = states(keys, stream, position_offsets).expand(pieces.shape[:-1])
    clocks = exponentials_of(pieces.spread(state).unsqueeze(-1), pieces.token_ids(weights.device))
    arrivals = weights.div_(clocks)
    if pieces.where is None:
        return first_argmax(arrivals).view(pieces.shape[:-1])
    best = pieces.collect(arrivals.amax(-1)).argmax(-1, keepdim=True)
    inside = pieces.collect(arrivals.argmax(-1)).gather(-1, best)
    return torch.add(inside, best, alpha=pieces.size).squeeze(-1)


def race_rows(weights: Tensor, keys: NoiseKeys, stream: Stream, position_offsets: Tensor) -> Tensor:
    """As `race`, of whole rows of rates [B, ..., V]. Overwrites `weights`."""
    offsets = position_offsets.expand(weights.shape[:-1])
    parts = []
    for some in chunks(weights):
        pieces = live_pieces(weights[some])
        own_keys = NoiseKeys(*(key[some] for key in keys))
        parts.append(race(pieces.of(weights[some]), pieces, own_keys, stream, offsets[some]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
