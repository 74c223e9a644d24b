"""Runs a DFlash or DFlash 2 head over many blocks of whole texts at once, each as it would be drafted."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.options.heads.dflash import DFlashNetwork
from hf_speculate.options.heads.dflash2 import DFlash2Network
from hf_speculate.options.heads.network import TargetParts


class BlockLogits(NamedTuple):
    """What a head predicts in the slots behind the first token of each of N blocks."""

    parallel: Tensor  # [N, b-1, V], without the token before a slot
    selected: Tensor  # [N, b-1, V], with it; of DFlash the same


class Context:
    """Stands for a `CacheView` while the states [R, W, H] of texts are read, and keeps their keys and values."""

    def __init__(self, width: int):
        self.columns = torch.arange(width)[None]  # [1, W]
        self.states: list[tuple[Tensor, Tensor]] = []  # by layer, each [R, heads, W, D]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep a layer's keys and values."""
        self.states.append((keys, values))


class Blocks:
    """Stands for a `CacheView` while N blocks are filled; each sees its text before its first token, and itself.

    Args:
        context: of R texts.
        starts: [R, M] int64, columns of the blocks' first tokens; N = R * M.
        block_size: b.
    """

    def __init__(self, context: Context, starts: Tensor, block_size: int):
        self.context, self.num_blocks = context, starts.shape[1]
        starts = starts.flatten()[:, None]  # [N, 1]
        self.columns = starts + torch.arange(block_size)  # [N, b]
        hidden = torch.cat(
            [context.columns >= starts, starts.new_zeros(len(starts), block_size).bool()], dim=1
        )
        mask = context.states[0][0].new_zeros(hidden.shape)  # attention wants one of its own dtype
        self._mask = mask.masked_fill(hidden, -torch.inf)[:, None, None]  # [N, 1, 1, W+b]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """[N, heads, W+b, D] keys and values of the context and of a block's own [N, heads, b, D]."""
        both = zip(self.context.states[layer], (keys, values), strict=True)
        read = [
            torch.cat([part.repeat_interleave(self.num_blocks, 0), own], dim=2)
            for part, own in both
        ]
        return read[0], read[1]

    def mask(self, layer: int) -> Tensor:
        """[N, 1, b, W+b] additive."""
        return self._mask.expand(-1, -1, self.columns.shape[1], -1)


def block_logits(
    network: DFlashNetwork, parts: TargetParts, ids: Tensor, states: Tensor, starts: Tensor
) -> BlockLogits:
    """The logits of the slots behind the first token of blocks, with the text's own tokens before each slot.

    Args:
        network: of layers without windows.
        parts: of the target.
        ids: [R, W] int64.
        states: [R, W, A * H], the target's.
        starts: [R, M] int64, at most W - b.

    Returns:
        Logits whose column i predicts the token i+1 behind a block's first.
    """
    context = Context(ids.shape[1])
    network.read(network.project(states), context)
    blocks = Blocks(context, starts, network.options.block_size)
    tokens = ids.repeat_interleave(starts.shape[1], dim=0).gather(1, blocks.columns)  # [N, b]
    slots = network.fill(tokens[:, 0], blocks, parts)[:, 1:]  # [N, b-1, H]
    logits = network.logits(slots, parts)
    if not isinstance(network, DFlash2Network):
        return BlockLogits(logits, logits)
    selector = network.candidate_selector
    # [N, b-1, r]
    joined = selector.predecessor_codebook[tokens[:, :-1]] * selector.hidden_projection(slots)
    return BlockLogits(logits, logits + joined @ selector.successor_codebook.T)
