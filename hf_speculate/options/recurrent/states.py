"""Recurrent and convolution states after each token of a forward, with rollback per row."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from hf_speculate.errors import UnsupportedModelError

_MAX_SINGLE_ROWS = 4  # largest number of rows copied one by one; more rows use a temporary tensor


class Slot(NamedTuple):
    """The name of a cache layer's state."""

    type: str  # "conv" or "recurrent"
    number: int  # index among the layer's states of this type


States = Mapping[Slot, Tensor]
"""The states [B, ...] of one cache layer; a convolution state is [B, C, kernel size]."""


class ModuleStates(NamedTuple):
    """One module's states after each token."""

    states: Sequence[States]  # [Q]; if states are not stored, all entries but the last are empty
    # computes the states after token t from the states before it; None if they are stored
    replay: Callable[[int, States], States] | None


class _Token(NamedTuple):
    states: States  # stored states of a layer after the token
    # compute the remaining states from the states before the token
    replays: Sequence[Callable[[States], States]]

    def after(self, before: States) -> States:
        states = {**before, **self.states}
        for replay in self.replays:
            states |= replay(before)
        return states


def states_of(layer: LinearAttentionCacheLayerMixin) -> dict[Slot, Tensor]:
    """Return the state tensors of a cache layer, without copies."""
    states: dict[Slot, Tensor | None] = {
        Slot("conv", index): state for index, state in layer.conv_states.items()
    }
    states |= {Slot("recurrent", index): state for index, state in layer.recurrent_states.items()}
    return {slot: state for slot, state in states.items() if state is not None}


def put_states(layer: LinearAttentionCacheLayerMixin, states: Mapping[Slot, Tensor | None]) -> None:
    """Store state tensors in a cache layer, without copies."""
    for slot, state in states.items():
        by_number: dict[int, Tensor | None] = (
            layer.conv_states if slot.type == "conv" else layer.recurrent_states
        )
        by_number[slot.number] = state


class LayerHistory:
    """A cache layer's states since the last rollback.

    It holds one set of states per token.
    """

    def __init__(self, layer: LinearAttentionCacheLayerMixin):
        self.layer = layer
        self.records: list[ModuleStates] = []  # states of the current forward
        self._base: States = states_of(layer)
        self._tokens: list[_Token] = []

    @property
    def current(self) -> States:
        return self._tokens[-1].states if self._tokens else self._base

    def restart(self) -> None:
        """Forget the tokens; later rollbacks stop at the layer's current states."""
        self._base, self._tokens, self.records = states_of(self.layer), [], []

    def detach(self) -> None:
        """Copy the layer's states, because the next forward writes in place."""
        put_states(self.layer, {slot: state.clone() for slot, state in self.current.items()})

    def add(self, num_query: int) -> None:
        """Append the tokens of a forward, from `records` and from the layer."""
        before, after = self.current, states_of(self.layer)
        records, self.records = self.records, []
        recorded = {slot for record in records for slot in record.states[-1]}
        others = {slot: state for slot, state in after.items() if slot not in recorded}
        if num_query > 1 and any(slot.type == "recurrent" for slot in others):
            raise UnsupportedModelError(
                "recurrent states must be written by modules that can read one token at a time, "
                "got a layer "
                f"{type(self.layer).__name__} that another module writes to; leave assistant_model "
                "out"
            )
        for token in range(num_query):
            states: dict[Slot, Tensor] = {}
            for record in records:
                states |= record.states[token]
            # unrecorded convolution states hold one column per token
            for slot, state in others.items():
                end = state.shape[-1] - (num_query - token - 1)
                states[slot] = (
                    state[..., end - before[slot].shape[-1] : end] if slot.type == "conv" else state
                )
            replays = [
                partial(record.replay, token)
                for record in records
                if record.replay and not record.states[token]
            ]
            self._tokens.append(_Token(states, replays))
        put_states(self.layer, self.current)

    def roll_back(self, counts: Sequence[int]) -> None:
        """Return each row to its states after its first `counts` [B] tokens."""
        states, num_read = self._base, 0
        by_count: dict[int, States] = {}
        for count in sorted(set(counts)):
            if count and not self._tokens[count - 1].replays:
                states = self._tokens[count - 1].states
            else:
                for token in self._tokens[num_read:count]:
                    states = token.after(states)
            num_read, by_count[count] = count, states
        self._base, self._tokens = mixed_rows(by_count, counts), []
        put_states(self.layer, self._base)

    def join(self, other: "LayerHistory") -> None:
        """Append the rows of `other` to the layer's states; forget earlier states."""
        joining = other.current
        put_states(
            self.layer,
            {slot: torch.cat([state, joining[slot]]) for slot, state in self.current.items()},
        )
        self.restart()

    def rows(self, indices: Tensor) -> None:
        """Select rows `indices` [N] int64 of the layer's states; forget earlier states."""
        states = {
            slot: state.index_select(0, indices.to(state.device))
            for slot, state in self.current.items()
        }
        put_states(self.layer, states)
        self.restart()


class RecurrentStates:
    """The recurrent layers of a cache.

    Call `begin` before each forward and `end` after it.
    """

    def __init__(self, cache: Cache, max_kept_bytes: int):
        self.cache = cache
        # Memory limit for states after each token. Above it, a rollback recomputes the states from
        # recorded projections.
        self.max_kept_bytes = max_kept_bytes
        self.histories = {
            index: LayerHistory(layer)
            for index, layer in enumerate(cache.layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
        }
        self.is_stepping = False  # whether the next forward reads its tokens one by one
        self.keeps = True  # whether states after each token are stored
        self.num_tokens = 0  # since the last rollback
        # [B] number of the forward's first tokens that a row's states already include
        self.num_skipped: list[int] | None = None
        self._is_prompt = False  # whether the tokens are read at once, without rollback
        self._recorded_past: list[bool] = []

    @property
    def num_bytes(self) -> int:
        states = [
            state for history in self.histories.values() for state in history.current.values()
        ]
        return sum(state.numel() * state.element_size() for state in states)

    def restart(self) -> None:
        for history in self.histories.values():
            history.restart()
        self.num_tokens = 0

    def begin(
        self, num_query: int, *, is_prompt: bool, num_skipped: list[int] | None = None
    ) -> None:
        """Prepare for a forward of Q tokens.

        Each row's states already include the first `num_skipped` [B] of them.
        """
        self.num_skipped = num_skipped
        self._is_prompt = is_prompt
        self.is_stepping = not is_prompt and (num_query > 1 or num_skipped is not None)
        self.keeps = self.num_bytes * (self.num_tokens + num_query) <= self.max_kept_bytes
        self._recorded_past = [history.layer.record_past for history in self.histories.values()]
        for history in self.histories.values():
            history.records = []
            if self.is_stepping:
                history.layer.record_past = True
            elif not is_prompt:
                history.detach()

    def end(self, num_query: int) -> None:
        for history, records_past in zip(self.histories.values(), self._recorded_past, strict=True):
            history.layer.record_past = records_past
            if self._is_prompt:
                history.restart()
            else:
                history.add(num_query)
        self.num_tokens = 0 if self._is_prompt else self.num_tokens + num_query
        self.is_stepping = False

    def roll_back(self, counts: Sequence[int]) -> None:
        """Keep the first `counts` [B] tokens since the last rollback, each 0..`num_tokens`."""
        for history in self.histories.values():
            history.roll_back(counts)
        self.num_tokens = 0

    def rows(self, indices: Tensor) -> None:
        for history in self.histories.values():
            history.rows(indices)
        self.num_tokens = 0

    def join(self, other: "RecurrentStates") -> None:
        for index, history in self.histories.items():
            history.join(other.histories[index])
        self.num_tokens = 0

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the current states, even in the middle of a forward."""
        saved = []
        for history in self.histories.values():
            saved.append(
                (history.layer, states_of(history.layer), dict(history.layer.has_previous_state))
            )
            history.detach()  # the cache continues with copies
        self.restart()

        def restore() -> None:
            for layer, states, had_previous in saved:
                for index in layer.has_previous_state:
                    conv, recurrent = Slot("conv", index), Slot("recurrent", index)
                    layer.is_conv_states_initialized[index] = conv in states
                    layer.is_recurrent_states_initialized[index] = recurrent in states
                    put_states(layer, {slot: states.get(slot) for slot in (conv, recurrent)})
                layer.has_previous_state = dict(had_previous)
            self.finish()

        return restore

    def finish(self) -> None:
        """Leave the layers in the state that plain decoding would leave."""
        self.is_stepping = False
        for history in self.histories.values():
            history.layer.record_past = False
        self.restart()


def mixed_rows(by_count: Mapping[int, States], counts: Sequence[int]) -> dict[Slot, Tensor]:
    """Select row b of `by_count[counts[b]]` for every row.

    Recurrent states are written into the states shared by most rows.
    """
    (common, _), *others = Counter(counts).most_common()
    rows = {
        count: [row for row, row_count in enumerate(counts) if row_count == count]
        for count, _ in others
    }
    mixed = {}
    for slot, state in by_count[common].items():
        if slot.type == "conv":  # a view of a tensor shared with states after other tokens
            state = state.clone(memory_format=torch.contiguous_format)
        # tensors of inference mode can only be written to in inference mode
        with torch.inference_mode(state.is_inference()):
            for count, indices in rows.items():
                source = by_count[count][slot]
                if len(indices) <= _MAX_SINGLE_ROWS:
                    for row in indices:
                        state[row].copy_(source[row])
                else:
                    index = torch.tensor(indices, device=state.device)
                    state.index_copy_(0, index, source.index_select(0, index))
        mixed[slot] = state
    return mixed
