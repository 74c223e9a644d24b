"""Draft chains from device graphs: one launch reads a round's pairs and drafts its tokens."""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.draft.token_choice import DraftSettings, draft_of
from hf_speculate.options.compiled.buffer_pool import BufferPool
from hf_speculate.options.compiled.fixed_tensors import Owner, fix
from hf_speculate.options.compiled.graphs import Graphing, tensor_key, weights_key
from hf_speculate.options.compiled.language_model import UNREAD_COLUMNS, States, width_for
from hf_speculate.options.compiled.plan import even_columns
from hf_speculate.options.heads.chain import (
    ChainInputs,
    ChainNetwork,
    chain_steps,
    pairs_over,
    read_pairs,
)
from hf_speculate.options.heads.network import TargetParts
from hf_speculate.options.heads.round import last_by_lens
from hf_speculate.types import DraftOut, Kept, NoiseKeys

if TYPE_CHECKING:
    from hf_speculate.options.heads.chain import ChainDrafter

# Rounds with more new tokens are drafted eagerly, because each replay reads this many columns.
_MAX_ACCEPTED = 16
_NUM_SUMMANDS = 2  # rows of numbers whose sum is the end of each row


class NewPairs(NamedTuple):
    """The new pairs of a round, at fixed addresses."""

    # [R + 2 or R + 5, B] int64: token ids, -1 after a row's last token; two summands of each row's
    # end; the noise keys, if tokens are sampled
    numbers: Tensor
    states: Tensor  # [B, R, D], the target's states; undefined after a row's last token
    newest: Tensor  # [depths, B, H], outputs at each row's last pair before the new pairs


class ChainOut(NamedTuple):
    """The outputs of a captured chain."""

    draft: DraftOut
    newest: Tensor  # [depths, B, H], outputs at each row's last true pair
    has_numbers: Tensor  # [B] bool, whether the last token was chosen from finite logits


def read_and_draft(
    network: ChainNetwork,
    new: NewPairs,
    offsets: Tensor | None,
    seen: Tensor,
    states: States,
    parts: TargetParts,
    num_steps: int,
    settings: DraftSettings,
) -> ChainOut:
    """Read the new pairs of a round, then draft `num_steps` tokens; see `ChainInputs`."""
    num_new = new.states.shape[1]
    token_ids, rows = new.numbers[:num_new].T, new.numbers[num_new:]  # [B, R]
    is_new, ends = token_ids >= 0, rows[0] + rows[1]
    lens, keys = is_new.sum(1), None
    if len(rows) > _NUM_SUMMANDS:
        keys = NoiseKeys(*rows[_NUM_SUMMANDS:].unbind())
    buffers = tuple(zip(*states, strict=True))
    inputs = ChainInputs(new.newest.unbind(), ends, offsets, seen, buffers)
    target_states = new.states.masked_fill(~is_new[:, :, None], 0)  # others may be NaN
    pairs = pairs_over(network, inputs)(token_ids.clamp_min(0), target_states, 0, 0)
    newest = read_pairs(
        network,
        pairs,
        parts,
        lambda outputs, before: last_by_lens(outputs, lens, before),
        inputs.outputs,
    )
    inputs = inputs._replace(outputs=tuple(newest), ends=ends + lens)
    chosen, has_numbers = chain_steps(network, inputs, parts, num_steps, settings, keys)
    return ChainOut(draft_of([chosen], settings), torch.stack(newest), has_numbers)


def parts_key(parts: TargetParts) -> Hashable:
    """Return a key that changes if graphs that read the target's parts must not be replayed."""
    ids = parts.vocabulary.target_ids
    return weights_key(*parts.modules), None if ids is None else tensor_key(ids)


class ChainGraphs:
    """The device graphs of a chain drafter.

    There is one for each draft length, attention width and kind of choice.

    Args:
        drafter: the drafter, whose cache is empty.
        graphs: runs the graphs.
        lens: captured draft lengths, ascending; other lengths are rounded up.
        max_length: maximum number of columns in the output of the call.
    """

    def __init__(
        self, drafter: "ChainDrafter", graphs: Graphing, lens: Sequence[int], max_length: int
    ):
        most = drafter.max_draft_tokens or max(lens)
        self._graphs, self._lens = graphs, sorted({min(length, most) for length in lens})
        if len(lens) > 1:  # K varies
            self._lens.insert(0, 1)
        longest = self._lens[-1]
        # R, the maximum number of new tokens per row that a graph reads
        self._max_new = min(longest, _MAX_ACCEPTED) + 1
        num_columns = max_length + self._max_new + longest + UNREAD_COLUMNS
        drafter.cache.take_from(
            BufferPool.of(drafter.network), even_columns(num_columns, drafter.device)
        )
        self._network, self._parts, self._cache = drafter.network, drafter.parts, drafter.cache
        self._padding = torch.full(
            (self._max_new, len(drafter.cache.row_lens.on_host)), -1, device=drafter.device
        )
        self._seen: dict[int, Tensor] = {}

    def draft(
        self,
        kept: Kept,
        newest: dict[int, Tensor],
        offsets: Tensor | None,
        num_steps: int,
        settings: DraftSettings,
        keys: NoiseKeys | None,
    ) -> ChainOut | None:
        """Read the emitted tokens and draft at least `num_steps` tokens in one launch.

        Return None, without reading any token, if no graph can. The next draft overwrites the
        result.

        Args:
            kept: the emitted tokens, with their states.
            newest: by depth, outputs [B, H] at each row's last pair; replaced by the new ones.
            offsets: see `ChainInputs`.
            num_steps: K.
            settings: how tokens are chosen.
            keys: noise keys; None to take the argmax.
        """
        cache, graphs, num_new = self._cache, self._cache.graphs, kept.token_ids.shape[1]
        length = next((length for length in self._lens if length >= num_steps), None)
        if graphs is None or not self._graphs.is_working:
            return None
        if num_new > self._max_new or length is None:
            return None
        self._graphs.bind_to(graphs)
        width = width_for(max(cache.row_lens.on_host) + self._max_new + length, cache.capacity)
        if width not in self._seen:
            self._seen[width] = torch.arange(width, device=self._padding.device)
        new = self._put(graphs, kept, newest, keys)
        keys_and_values = zip(
            *(cache.buffers[layer] for layer in sorted(cache.buffers)), strict=True
        )
        choice = "greedy" if keys is None else settings._replace(eos_token_ids=None)
        out: ChainOut | None = self._graphs.run_in_place(
            f"chain, {choice}",
            length,
            read_and_draft,
            new,
            offsets,
            self._seen[width],
            States(*keys_and_values),
            self._parts,
            length,
            settings,
        )
        if out is None:
            return None
        new.newest.copy_(out.newest)
        cache.advance(kept.num_emitted.tolist())
        return out

    def _put(
        self,
        graphs: dict[Hashable, Any],
        kept: Kept,
        newest: dict[int, Tensor],
        keys: NoiseKeys | None,
    ) -> NewPairs:
        """Copy the inputs of a round to their addresses."""
        num_new, states = kept.token_ids.shape[1], kept.hidden_states
        if states is None:
            raise RuntimeError("a chain reads hidden states, got none")
        numbers = (*self._cache.row_lens.summands(), *(keys or ()))  # each [B]
        rows = [kept.token_ids.T, self._padding[num_new:], *(row[None] for row in numbers)]
        key = "new pairs", self._max_new, len(numbers)
        if key not in graphs:
            weight, (batch_size, _, width) = newest[0], states.shape
            made = NewPairs(
                torch.cat(rows),
                weight.new_zeros(batch_size, self._max_new, width),
                torch.stack([newest[depth] for depth in sorted(newest)]),
            )
            owner = Owner()
            for tensor in made:
                fix(tensor, owner)
            graphs[key] = made, owner
        new: NewPairs = graphs[key][0]
        torch.cat(rows, out=new.numbers)
        new.states[:, :num_new].copy_(states)
        for depth, fixed in enumerate(new.newest.unbind()):
            if newest[depth].data_ptr() != fixed.data_ptr():
                fixed.copy_(newest[depth])
                newest[depth] = fixed
        return new
