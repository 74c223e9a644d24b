"""Drafts a whole chain of tokens as one compiled unit, from each row's output at its last true pair on."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.draft.base import DraftCompilation, DrafterSetup
from hf_speculate.draft.heads.chain_network import ChainNetwork, Pairs
from hf_speculate.draft.heads.row_cache import FixedColumns, Placed, RowCache
from hf_speculate.draft.heads.target_parts import TargetParts
from hf_speculate.draft.heads.unrolled import MAX_UNROLLED_STEPS, Choosing, Unrolled
from hf_speculate.models.compilation import Compilation
from hf_speculate.models.compiled import UNREAD_COLUMNS, width_for
from hf_speculate.triton_kernels import sample
from hf_speculate.types import NoiseKeys


class ChainInputs(NamedTuple):
    """Where a chain begins."""

    outputs: Tensor  # [B, H] at each row's last true pair
    ends: Tensor  # [B] int64, each row's first position without a true pair
    seen: Tensor  # [W] int64, the columns 0..W-1 that attention reads


def chain_steps(
    network: ChainNetwork,
    inputs: ChainInputs,
    buffers: tuple[tuple[Tensor, Tensor], ...],
    parts: TargetParts,
    choosing: Choosing,
    keys: NoiseKeys | None,
) -> Unrolled:
    """Draft tokens one after another with a network of one depth; the last one is not fed.

    Args:
        network: the head's.
        inputs: of this round.
        buffers: keys and values by layer, each [B, heads, capacity, D], written to.
        parts: of the target.
        choosing: how tokens are chosen.
        keys: of the round's noise; None to take the argmax.
    """
    vocabulary, width = network.vocabulary, inputs.seen.shape[0]
    ids, kept_logits, sums = [], [], []
    logits, states = network.read(inputs.outputs, parts)
    for step in range(choosing.num_steps):
        if keys is None:
            token_ids = vocabulary.ids(logits.argmax(dim=-1))
        else:
            scores = vocabulary.scattered(logits)  # [B, V]
            step_keys = keys._replace(positions=keys.positions + step)
            token_ids, logsumexp = sample(scores, keys=step_keys, stream=choosing.stream, backend="torch")
            kept_logits.append(scores)
            sums.append(logsumexp)
        ids.append(token_ids)
        if step + 1 < choosing.num_steps:
            columns = (inputs.ends + step)[:, None]
            placed = Placed(columns, width, network.windows, inputs.outputs.dtype)
            pairs = Pairs(token_ids[:, None], states[:, None], columns, placed)
            logits, states = network.read(network.run(0, pairs, FixedColumns(buffers), parts)[:, -1], parts)
    if keys is None or not choosing.keeps_logits:
        return Unrolled(torch.stack(ids, dim=1), None, None)
    return Unrolled(torch.stack(ids, dim=1), torch.stack(kept_logits, dim=1), torch.stack(sums, dim=1))


class CompiledChain:
    """The compiled chains of one call.

    Args:
        network: the head's, of one depth.
        setup: of the call.
        request: of the call.
        cache: of the call; it gets columns for the whole call.
    """

    def __init__(self, network: ChainNetwork, setup: DrafterSetup, request: DraftCompilation, cache: RowCache):
        self._network, self._stream, self._keeps_logits = network, setup.stream, setup.keeps_logits
        self._lens = tuple(num for num in request.lens if num <= MAX_UNROLLED_STEPS)
        module: Any = network  # every network is one
        self._compilation = Compilation(module, request.settings, request.units, request.on_failure)
        self._cache = cache
        cache.reserve(setup.max_length + max(request.lens) + 1 + UNREAD_COLUMNS)

    @property
    def is_working(self) -> bool:
        """Whether nothing has failed to compile."""
        return self._compilation.is_working

    def draft(
        self, outputs: Tensor, parts: TargetParts, num_draft_tokens: int, keys: NoiseKeys | None
    ) -> Unrolled | None:
        """A chain after outputs [B, H], of K tokens or more; None if it must be drafted step by step.

        Args:
            outputs: at each row's last true pair.
            parts: of the target.
            num_draft_tokens: K.
            keys: of the round's noise, on the head's device; None to take the argmax.
        """
        num_steps = next((num for num in self._lens if num >= num_draft_tokens), None)
        buffers = self._cache.buffers
        if num_steps is None or buffers is None or not self.is_working:
            return None
        width = width_for(max(self._cache.lens) + num_steps, self._cache.capacity)
        inputs = ChainInputs(outputs.contiguous(), self._cache.ends, torch.arange(width, device=outputs.device))
        choosing = Choosing(num_steps, self._stream, self._keeps_logits)
        name = f"chain of {num_steps}, {'greedy' if keys is None else choosing}"
        result: Unrolled | None = self._compilation.run(name, chain_steps, inputs, buffers, parts, choosing, keys)
        return result
