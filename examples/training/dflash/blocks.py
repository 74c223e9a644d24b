"""Run a DFlash or DFlash 2 head over many blocks of complete texts at once, as in drafting."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.options.heads.dflash import DFlashNetwork
from hf_speculate.options.heads.dflash2 import DFlash2Network
from hf_speculate.options.heads.network import TargetParts


class BlockLogits(NamedTuple):
    """Logits of N blocks, after the first token of each."""

    parallel: Tensor  # [N, b-1, V], without the token before a slot
    selected: Tensor  # [N, b-1, V], with this token; the same for DFlash


class Context:
    """Stand-in for a `CacheView` that keeps the states of texts.

    It stores keys and values while the states [R, W, H] of the texts are read.
    """

    def __init__(self, width: int):
        self.columns = torch.arange(width)[None]  # [1, W]
        self.states: list[tuple[Tensor, Tensor]] = []  # by layer, each [R, heads, W, D]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of a layer."""
        self.states.append((keys, values))


class Blocks:
    """Stand-in for a `CacheView` that fills N blocks.

    Each block sees itself and the text before its first token.

    Args:
        context: context of R texts.
        starts: [R, M] int64, columns of the first tokens of the blocks; N = R * M.
        block_size: b.
    """

    def __init__(self, context: Context, starts: Tensor, block_size: int):
        self.context, self.num_blocks = context, starts.shape[1]
        starts = starts.flatten()[:, None]  # [N, 1]
        self.columns = starts + torch.arange(block_size)  # [N, b]
        hidden = torch.cat(
            [context.columns >= starts, starts.new_zeros(len(starts), block_size).bool()], dim=1
        )
        # attention needs a mask in its own dtype
        mask = context.states[0][0].new_zeros(hidden.shape)
        self._mask = mask.masked_fill(hidden, -torch.inf)[:, None, None]  # [N, 1, 1, W+b]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, heads, W+b, D] of the context and the block.

        Args:
            layer: index of the layer.
            keys: keys of the block, [N, heads, b, D].
            values: values of the block, [N, heads, b, D].
        """
        both = zip(self.context.states[layer], (keys, values), strict=True)
        read = [
            torch.cat([context_part.repeat_interleave(self.num_blocks, 0), block_part], dim=2)
            for context_part, block_part in both
        ]
        return read[0], read[1]

    def mask(self, layer: int) -> Tensor:
        """Return the additive mask [N, 1, b, W+b]."""
        return self._mask.expand(-1, -1, self.columns.shape[1], -1)


def block_logits(
    network: DFlashNetwork, parts: TargetParts, ids: Tensor, states: Tensor, starts: Tensor
) -> BlockLogits:
    """Return the logits at the slots after the first token of each block.

    The token before each slot is the one in the text.

    Args:
        network: network whose layers have no windows.
        parts: shared parts of the target.
        ids: [R, W] int64.
        states: [R, W, A * H], states of the target.
        starts: [R, M] int64, at most W - b.

    Returns:
        Logits; column i predicts the token i+1 places after the first token of a block.
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
