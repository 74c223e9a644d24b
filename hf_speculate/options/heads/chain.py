"""Draft a chain of tokens with a network of (token, state) pairs: EAGLE-3 and MTP layers.

A pair joins token t_{i+1} with the state of token t_i. It has position i and predicts t_{i+2}. The
first token of a draft comes from true pairs with the target's states. Each later token comes from
the pair of the last drafted token and the network's output at the previous pair. Such pairs are
dropped at the end of the round.

A checkpoint with several MTP layers gives a network with several depths. Depth d reads the output
of depth d - 1 at the previous pair: its pair at position p joins t_{p+1} with depth d - 1's state
at p - 1. Depth d has no pair at positions below d. Draft step k runs depth (k - 1) mod n. On its
first turn, a depth catches up on the tokens drafted earlier.
"""

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.token_choice import DraftSettings, RoundDraft, choose_step
from hf_speculate.models.inferencer import Chosen, joined
from hf_speculate.options.compiled.compilation import Compilation
from hf_speculate.options.compiled.language_model import UNREAD_COLUMNS, width_for
from hf_speculate.options.heads.head import HeadSpec, shape_of
from hf_speculate.options.heads.media import FIRST_INPUT, MediaEmbeddings
from hf_speculate.options.heads.network import HeadNetwork, TargetParts
from hf_speculate.options.heads.round import HeadDrafter, MergedEmbeddings, NewTokens, last_of
from hf_speculate.options.heads.row_axes import RowAxes
from hf_speculate.options.heads.row_cache import CacheView
from hf_speculate.types import Kept, NoiseKeys

_MAX_UNROLLED_STEPS = 16  # longer drafts would compile slowly, so they run step by step


class Pairs(NamedTuple):
    """Pairs of tokens and states for one forward.

    All pairs go through one depth of a network.
    """

    token_ids: Tensor  # [B, N] int64
    states: Tensor  # [B, N, H], the target's states after `project`, or earlier outputs
    positions: Tensor  # [B or 1, N] int64, or [3, B, N] in time, height and width
    view: CacheView
    merged: MergedEmbeddings | None = None

    def embedded(self, embeddings: Tensor) -> Tensor:
        """Merge images and audio into token embeddings [B, N, Ht] if the network reads them."""
        return embeddings if self.merged is None else self.merged.merge(embeddings)


class ChainNetwork(HeadNetwork):
    """A network of (token, state) pairs.

    A `ChainDrafter` drafts a chain of tokens with it.
    """

    num_depths: int = 1  # number of layers run in turn, each with its own pairs and caches
    is_traceable: bool = True  # whether its forwards can be compiled
    reads_axes: bool = False  # whether positions have three axes: time, height and width

    @abstractmethod
    def run(self, depth: int, pairs: Pairs, parts: TargetParts) -> Tensor:
        """Run one depth on pairs and return its outputs [B, N, H].

        Keys and values are written to the cache.
        """

    def read(self, outputs: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        """Return logits [B, Vd] for outputs [B, H], and the states [B, H] for the next pairs."""
        return self.logits(outputs, parts), outputs


class ChainInputs(NamedTuple):
    """The inputs to a compiled chain."""

    outputs: Tensor  # [B, H] at each row's last true pair
    ends: Tensor  # [B] int64, each row's first position without a true pair
    offsets: Tensor | None  # [B, 3] int64, positions minus `ends`, per axis; None for one axis
    seen: Tensor  # [W] int64, columns 0..W-1 to attend to
    buffers: tuple[tuple[Tensor, Tensor], ...]  # keys and values by layer, updated in place


def chain_steps(
    network: ChainNetwork,
    inputs: ChainInputs,
    parts: TargetParts,
    num_steps: int,
    settings: DraftSettings,
    keys: NoiseKeys | None,
) -> Chosen:
    """Draft tokens one after another with a network of one depth.

    Take the argmax if there are no noise `keys`.
    """
    vocabulary, width = parts.vocabulary, inputs.seen.shape[0]
    row_ids = torch.arange(len(inputs.ends), device=inputs.ends.device)[:, None]
    buffers, drafted = dict(enumerate(inputs.buffers)), []
    logits, states = network.read(inputs.outputs, parts)
    for step in range(num_steps):
        if keys is None:
            greedy = choose_step(vocabulary.cut(logits), None, settings)
            chosen = greedy._replace(token_ids=vocabulary.ids(greedy.token_ids))
        else:
            step_keys = keys._replace(positions=keys.positions + step)
            chosen = choose_step(vocabulary.scattered(logits), step_keys, settings)
        drafted.append(chosen)
        if step + 1 < num_steps:
            columns = (inputs.ends + step)[:, None]
            view = CacheView(
                buffers, 0, row_ids, columns, width, network.layer_masks, inputs.outputs.dtype
            )
            positions = columns
            if inputs.offsets is not None:
                positions = columns + inputs.offsets.T[:, :, None]  # [3, B, 1]
            pairs = Pairs(chosen.token_ids, states[:, None], positions, view)
            logits, states = network.read(network.run(0, pairs, parts)[:, -1], parts)
    return joined(drafted)


class ChainDrafter(HeadDrafter[ChainNetwork]):
    """A drafter of one token per forward.

    It runs a `ChainNetwork`, compiled if the call requests compilation.
    """

    PARTS: ClassVar[tuple[str, ...]] = (*HeadDrafter.PARTS, "_axes")

    def __init__(self, network: ChainNetwork, spec: HeadSpec, setup: DrafterSetup):
        super().__init__(network, spec, setup)
        axes = setup.prompt_axes if network.reads_axes else None
        self._axes = None if axes is None else RowAxes(axes, setup.num_pads, self.device)
        self._media = MediaEmbeddings.of(setup, spec, self.device)
        if self._media is not None:
            self.hidden_layers = (*spec.hidden_layers, FIRST_INPUT)
        self._compilation: Compilation | None = None
        self._compiled_lens: tuple[int, ...] = ()
        request = setup.compilation
        # With an eager target, rows leave the batch, and each batch size would be compiled
        # separately.
        is_target_eager = shape_of(setup.target.config).num_layers in spec.hidden_layers
        if (
            request is not None
            and network.is_traceable
            and self.chooser.is_plain
            and not is_target_eager
        ):
            self._compilation = Compilation(
                network, request.settings, request.units, request.on_failure
            )
            self._compiled_lens = tuple(
                length for length in request.lens if length <= _MAX_UNROLLED_STEPS
            )
            self.is_compiled = self._compilation.is_working
            # for the whole call
            self.cache.reserve(setup.max_length + max(request.lens) + 1 + UNREAD_COLUMNS)

    def propose(self, new: NewTokens, num_draft_tokens: int, draft: RoundDraft) -> None:
        self._read_chunks(new)
        compiled = self._draft_compiled(num_draft_tokens, draft.keys)
        if compiled is not None:
            draft.tokens.add(compiled)
            return
        num_depths = self.network.num_depths
        outputs = [[self.newest_outputs[depth]] for depth in range(num_depths)]  # each [B, H]
        logits, feedback = self.network.read(outputs[0][0], self.parts)
        drafted = [draft.choose(logits)]  # each [B]
        num_written = [0] * num_depths  # columns written by each depth past the rows' ends
        for step in range(1, num_draft_tokens):
            if draft.are_enough():
                break
            depth = step % num_depths
            if step < num_depths:  # first turn of the depth: catch up
                states = torch.stack(outputs[depth - 1][:step], dim=1)  # [B, step, H]
                token_ids, first = torch.stack(drafted, dim=1), 0
            else:
                states, token_ids, first = feedback[:, None], drafted[-1][:, None], step - 1
            num_new = token_ids.shape[1]
            positions = self._positions(self.cache.row_lens.positions(num_new, first))
            pairs = Pairs(
                token_ids, states, positions, self.cache.view(num_new, num_written[depth])
            )
            states_of_pairs = self.network.run(depth, pairs, self.parts)  # [B, N, H]
            num_written[depth] += num_new
            outputs[depth] += states_of_pairs.unbind(1)
            logits, feedback = self.network.read(states_of_pairs[:, -1], self.parts)
            drafted.append(draft.choose(logits))

    def _draft_compiled(self, num_draft_tokens: int, keys: NoiseKeys | None) -> Chosen | None:
        """Draft at least K tokens in a compiled chain; return None for eager drafting."""
        num_steps = next(
            (length for length in self._compiled_lens if length >= num_draft_tokens), None
        )
        if (
            self._compilation is None
            or num_steps is None
            or len(self.cache.buffers) < len(self.network.layer_masks)
        ):
            return None
        width = width_for(max(self.cache.row_lens.on_host) + num_steps, self.cache.capacity)
        seen = torch.arange(width, device=self.device)
        outputs, buffers = self.newest_outputs[0].contiguous(), tuple(self.cache.buffers.values())
        offsets = None if self._axes is None else self._axes.offsets
        inputs = ChainInputs(outputs, self.cache.row_lens.on_device(), offsets, seen, buffers)
        # chains do not finish rows
        settings = self.chooser.settings._replace(eos_token_ids=None, backend="torch")
        axes = "" if offsets is None else ", axes"
        name = f"chain of {num_steps}, {'greedy' if keys is None else settings}{axes}"
        return self._compilation.run(
            name, chain_steps, inputs, self.parts, num_steps, settings, keys
        )

    def project_states(self, states: Tensor) -> Tensor:
        if self._media is None:
            return super().project_states(states)
        states, inputs = self._media.split(states)
        return self._media.join(super().project_states(states), inputs)

    def _new_tokens(self, query: Tensor, kept: Kept | None) -> NewTokens:
        new = super()._new_tokens(query, kept)
        return new if self._media is None else self._media.read(new)

    def _positions(self, numbers: Tensor) -> Tensor:
        """Return the positions of the tokens with `numbers` [B or 1, N] in each row.

        With three axes, the result is [3, B, N]; with one axis, it is the numbers themselves.
        """
        return numbers if self._axes is None else self._axes.at(numbers)

    def read_new(self, new: NewTokens) -> None:
        states = new.states
        if states is None or not new.width:
            return
        for depth in range(self.network.num_depths):
            view = self.cache.view(new.width)
            pairs = Pairs(new.token_ids, states, self._positions(view.columns), view, new.merged)
            outputs = self.network.run(depth, pairs, self.parts)
            before = self.newest_outputs.get(depth)
            self.newest_outputs[depth] = last_of(outputs, new, before)
            if depth + 1 < self.network.num_depths:
                head = torch.zeros_like(outputs[:, 0]) if before is None else before
                # each comes from the previous pair
                states = torch.cat([head[:, None], outputs[:, :-1]], dim=1)
        self.cache.advance(new.counts, new.lens)
