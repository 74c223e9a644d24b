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

import importlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.token_choice import DraftSettings, RoundDraft, choose_step
from hf_speculate.models.inferencer import Chosen, joined
from hf_speculate.models.module_walk import has_hooks_of_others, is_compiled
from hf_speculate.models.runner import GRAPH_BACKENDS
from hf_speculate.options.compiled.compilation import Compilation
from hf_speculate.options.compiled.drafter import sent
from hf_speculate.options.compiled.language_model import UNREAD_COLUMNS, width_for
from hf_speculate.options.heads.head import HeadSpec, shape_of
from hf_speculate.options.heads.media import FIRST_INPUT, MediaEmbeddings
from hf_speculate.options.heads.network import HeadNetwork, TargetParts
from hf_speculate.options.heads.round import (
    HeadDrafter,
    MergedEmbeddings,
    NewTokens,
    last_of,
)
from hf_speculate.options.heads.row_axes import RowAxes
from hf_speculate.options.heads.row_cache import CacheView
from hf_speculate.types import DraftOut, Kept, NoiseKeys

if TYPE_CHECKING:
    from hf_speculate.engine.runners import Runners
    from hf_speculate.options.heads.chain_graphs import ChainGraphs

_GRAPHS = "hf_speculate.options.heads.chain_graphs"  # imported if the target runs from graphs
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


# Makes pairs of tokens [B, N] and states [B, N, H]. The first number is the position of the first
# pair after each row's end, the second its column there.
PairsAt = Callable[[Tensor, Tensor, int, int], Pairs]


def read_pairs(
    network: ChainNetwork,
    pairs: Pairs,
    parts: TargetParts,
    last: Callable[[Tensor, Tensor | None], Tensor],
    before: Sequence[Tensor | None],
) -> list[Tensor]:
    """Run all depths on true pairs; return each depth's output [B, H] at each row's last pair.

    Args:
        network: the network.
        pairs: the pairs, with the target's states.
        parts: the parts shared with the target.
        last: selects the outputs [B, H] at the last pairs from outputs [B, N, H], or those of
            `before` in rows without pairs.
        before: by depth, the result of the last call; None before the first call.
    """
    newest = []
    for depth in range(network.num_depths):
        outputs = network.run(depth, pairs, parts)
        newest.append(last(outputs, before[depth]))
        if depth + 1 < network.num_depths:
            head = before[depth]
            head = torch.zeros_like(outputs[:, 0]) if head is None else head
            # each comes from the previous pair
            pairs = pairs._replace(states=torch.cat([head[:, None], outputs[:, :-1]], dim=1))
    return newest


def draft_chain(
    network: ChainNetwork,
    newest: Sequence[Tensor],
    parts: TargetParts,
    num_steps: int,
    choose: Callable[[Tensor], Tensor],
    pairs_at: PairsAt,
    are_enough: Callable[[], bool] = lambda: False,
) -> None:
    """Draft tokens one after another.

    Args:
        network: the network.
        newest: by depth, outputs [B, H] at each row's last true pair.
        parts: the parts shared with the target.
        num_steps: K.
        choose: chooses and records the next tokens [B] from logits [B, Vd].
        pairs_at: makes the pairs of drafted tokens.
        are_enough: returns whether no row needs more tokens.
    """
    num_depths = network.num_depths
    outputs = [[states] for states in newest]
    logits, feedback = network.read(outputs[0][0], parts)
    drafted = [choose(logits)]  # each [B]
    num_written = [0] * num_depths  # columns written by each depth past the rows' ends
    for step in range(1, num_steps):
        if are_enough():
            break
        depth = step % num_depths
        if step < num_depths:  # first turn of the depth: catch up
            states = torch.stack(outputs[depth - 1][:step], dim=1)  # [B, step, H]
            token_ids, first = torch.stack(drafted, dim=1), 0
        else:
            states, token_ids, first = feedback[:, None], drafted[-1][:, None], step - 1
        pairs = pairs_at(token_ids, states, first, num_written[depth])
        states_of_pairs = network.run(depth, pairs, parts)  # [B, N, H]
        num_written[depth] += token_ids.shape[1]
        outputs[depth] += states_of_pairs.unbind(1)
        logits, feedback = network.read(states_of_pairs[:, -1], parts)
        drafted.append(choose(logits))


class ChainInputs(NamedTuple):
    """The inputs to a compiled or captured chain."""

    outputs: tuple[Tensor, ...]  # by depth, [B, H] at each row's last true pair
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
) -> tuple[Chosen, Tensor]:
    """Draft tokens one after another; take the argmax if there are no noise `keys`.

    The second result is whether the last token was chosen from finite logits, [B] bool.
    """
    vocabulary = parts.vocabulary
    last_logits = inputs.outputs[0]
    drafted: list[Chosen] = []  # dynamo cannot trace list[Chosen]()

    def choose(logits: Tensor) -> Tensor:
        nonlocal last_logits
        last_logits = logits
        if keys is None:
            greedy = choose_step(vocabulary.cut(logits), None, settings)
            chosen = greedy._replace(token_ids=vocabulary.ids(greedy.token_ids))
        else:
            step_keys = keys._replace(positions=keys.positions + len(drafted))
            chosen = choose_step(vocabulary.scattered(logits), step_keys, settings)
        drafted.append(chosen)
        return chosen.token_ids[:, 0]

    draft_chain(network, inputs.outputs, parts, num_steps, choose, pairs_over(network, inputs))
    return joined(drafted), last_logits.amax(dim=-1).isfinite()


def pairs_over(network: ChainNetwork, inputs: ChainInputs) -> PairsAt:
    """Return the function that makes pairs over a chain's fixed buffers."""
    ends, buffers = inputs.ends, dict(enumerate(inputs.buffers))
    width, dtype = inputs.seen.shape[0], inputs.outputs[0].dtype
    row_ids = torch.arange(len(ends), device=ends.device)[:, None]  # [B, 1]

    def pairs_at(token_ids: Tensor, states: Tensor, first: int, column: int) -> Pairs:
        steps = torch.arange(token_ids.shape[1], device=ends.device)
        columns, positions = (ends[:, None] + (steps + start) for start in (column, first))
        if inputs.offsets is not None:
            positions = positions + inputs.offsets.T[:, :, None]  # [3, B, N]
        view = CacheView(buffers, 0, row_ids, columns, width, network.layer_masks, dtype)
        return Pairs(token_ids, states, positions, view)

    return pairs_at


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
        self._graphs: ChainGraphs | None = None
        # [B] bool, see `has_numbers`; None if the last draft was eager
        self._has_numbers: Tensor | None = None
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
        samples = setup.config.draft_sampling == "sample"
        self.can_capture = (
            self._compilation is None
            and self._media is None
            and self.device == setup.target.device
            and self.device.type in GRAPH_BACKENDS
            and not is_compiled(network)
            # "auto" leaves hooks alone, as they would run in a capture only
            and (setup.config.speculation_graphs == "on" or not has_hooks_of_others(network))
            and (self.chooser.is_plain or (samples and bool(self.chooser.warp_alone())))
        )

    def capture(self, setup: DrafterSetup, runners: "Runners") -> None:
        if not self.can_capture:
            return
        option = importlib.import_module(_GRAPHS)
        graphs = runners.head_graphs(self.network, option.parts_key(self.parts))
        if graphs is not None and graphs.is_working:
            self._graphs = option.ChainGraphs(self, graphs, runners.lens, setup.max_length)
            runners.at_end(self.cache.release)

    def draft_captured(
        self, kept: Kept | None, num_draft_tokens: int, keys: NoiseKeys | None
    ) -> DraftOut | None:
        self._has_numbers = None
        if self._graphs is None or kept is None or not self.newest_outputs:
            return None  # nothing has been read yet
        settings = self.chooser.settings
        if not self.chooser.is_plain:
            settings = settings._replace(warp=self.chooser.warp_alone())
        offsets = None if self._axes is None else self._axes.offsets
        out = self._graphs.draft(
            kept, self.newest_outputs, offsets, num_draft_tokens, settings, keys
        )
        if out is None:
            return None
        self._has_numbers, draft = out.has_numbers, out.draft
        if draft.token_ids.shape[1] > num_draft_tokens:
            logits, logsumexp = (
                None if part is None else part[:, :num_draft_tokens]
                for part in (draft.token_logits, draft.logsumexp)
            )
            lens = draft.lens.clamp_max(num_draft_tokens)
            draft = DraftOut(draft.token_ids[:, :num_draft_tokens], lens, logits, logsumexp)
        return sent(draft, self._tokens_device)

    def forget(self) -> None:
        super().forget()
        self._has_numbers = None

    def has_numbers(self) -> Tensor | None:
        return super().has_numbers() if self._has_numbers is None else self._has_numbers

    def propose(self, new: NewTokens, num_draft_tokens: int, draft: RoundDraft) -> None:
        self._read_chunks(new)
        compiled = self._draft_compiled(num_draft_tokens, draft.keys)
        if compiled is not None:
            draft.tokens.add(compiled)
            return
        newest = [self.newest_outputs[depth] for depth in range(self.network.num_depths)]
        draft_chain(
            self.network,
            newest,
            self.parts,
            num_draft_tokens,
            draft.choose,
            self._pairs_at,
            draft.are_enough,
        )

    def _pairs_at(self, token_ids: Tensor, states: Tensor, first: int, column: int) -> Pairs:
        num_pairs = token_ids.shape[1]
        positions = self._positions(self.cache.row_lens.positions(num_pairs, first))
        return Pairs(token_ids, states, positions, self.cache.view(num_pairs, column))

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
        outputs, buffers = (
            (self.newest_outputs[0].contiguous(),),
            tuple(self.cache.buffers.values()),
        )
        offsets = None if self._axes is None else self._axes.offsets
        inputs = ChainInputs(outputs, self.cache.row_lens.on_device(), offsets, seen, buffers)
        # chains do not finish rows
        settings = self.chooser.settings._replace(eos_token_ids=None, backend="torch")
        axes = "" if offsets is None else ", axes"
        name = f"chain of {num_steps}, {'greedy' if keys is None else settings}{axes}"
        result = self._compilation.run(
            name, chain_steps, inputs, self.parts, num_steps, settings, keys
        )
        if result is None:
            return None
        chosen, self._has_numbers = result
        return chosen  # type: ignore[no-any-return]

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
        if new.states is None or not new.width:
            return
        view = self.cache.view(new.width)
        pairs = Pairs(new.token_ids, new.states, self._positions(view.columns), view, new.merged)
        newest = read_pairs(
            self.network,
            pairs,
            self.parts,
            lambda outputs, before: last_of(outputs, new, before),
            [self.newest_outputs.get(depth) for depth in range(self.network.num_depths)],
        )
        self.newest_outputs = dict(enumerate(newest))
        self.cache.advance(new.counts, new.lens)
