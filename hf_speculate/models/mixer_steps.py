"""Lets a mixer read the tokens of a forward one by one, over projections that read all of them at once."""

import copy
import inspect
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, LinearAttentionLayer

from hf_speculate.cache.recurrent import ModuleStates, RecurrentStates, Slot, States, put_states, states_of


class Mixer(NamedTuple):
    """A module that reads and writes states of a cache layer, and the names of its forward's arguments."""

    module: nn.Module
    layer_index: int
    hidden_name: str  # [B, Q, D]
    cache_name: str
    mask_names: tuple[str, ...]


class StepProtocol(NamedTuple):
    """How a class of mixers reads one token."""

    slots: frozenset[Slot]  # of the states that it writes
    inputs: frozenset[str]  # children that read the token itself, or what another of them made of it alone
    prepared: str | None  # the one of them that comes first and reads what the mixer made of the token; None: none does
    output: str | None  # the child whose output the mixer returns; None: there is none
    writes_recurrent: bool  # whether it writes to the recurrent state that it is given
    reads_at_once: bool  # whether several tokens after a cached text give what they give one by one
    reads_columns: bool  # whether it has convolution states alone, which are rolled back without reading one by one
    num_bytes: int  # of the states of one row


class StepLayer(LinearAttentionLayer):
    """A cache layer that takes new states without copying them."""

    def load(self, states: States) -> None:
        """Hold these states."""
        put_states(self, states)
        for slot, state in states.items():
            self.has_previous_state[slot.number] = True
            if slot.kind == "conv":
                self.is_conv_states_initialized[slot.number] = True
                self.conv_kernel_size[slot.number] = state.shape[-1]
            else:
                self.is_recurrent_states_initialized[slot.number] = True

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Hold a new state, in the dtype of the one before."""
        held = self.recurrent_states[state_idx]
        state = recurrent_states if held is None else recurrent_states.to(held.dtype)
        self.recurrent_states[state_idx] = state
        self.is_recurrent_states_initialized[state_idx] = True
        return state


class _Reading:
    """One forward of a mixer over Q tokens."""

    def __init__(self, hidden: Tensor, arguments: dict[str, Any], layer: StepLayer, before: States):
        self.tokens = _by_token(hidden)
        self.arguments = arguments  # without the hidden states
        self.layer = layer
        self.before = before  # states before the token that is read next
        self.held: dict[str, tuple[Tensor, ...]] = {}  # by input child: its outputs, by token
        self.whole = {id(self.tokens[0]): (self.tokens[0], hidden)}  # what stands for all tokens, by the first one's id
        self.prepared: Tensor | None = None  # what the mixer made of all tokens for its first child
        self.widened = ""  # the input child that reads all tokens now
        self.states: list[States] = []


class SteppedMixer:
    """Hooks on a mixer, which act in forwards of one cache that may be rolled back.

    The mixer itself reads the first token, while its input children read all of them. Where it comes to its output
    child, a copy of the mixer reads the other tokens one by one, given what the input children made of them; then the
    output child reads all tokens, and the mixer returns what belongs to all of them.

    Args:
        mixer: the module, which stays as it is but for the hooks.
        protocol: of its class.
        states: of the cache.
    """

    def __init__(self, mixer: Mixer, protocol: StepProtocol, states: RecurrentStates):
        self.mixer = mixer
        self.protocol = protocol
        self.states = states
        self._names = list(inspect.signature(type(mixer.module).forward).parameters)[1:]
        children = dict(mixer.module.named_children())
        self._inputs = {name: _Held(children[name]) for name in protocol.inputs}
        self._output = None if protocol.output is None else _Seen(children[protocol.output])
        self._copy = copy.copy(mixer.module)
        parts = self._inputs if self._output is None else {**self._inputs, str(protocol.output): self._output}
        vars(self._copy)["_modules"] = {**vars(self._copy)["_modules"], **parts}
        self._reading: _Reading | None = None
        self._thread = 0

    def attach(self, handles: list[RemovableHandle]) -> None:
        """Register the hooks.

        Args:
            handles: gains what removes them.
        """
        module = self.mixer.module
        children = dict(module.named_children())
        handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
        handles.append(module.register_forward_hook(self._leave, prepend=True, always_call=True))
        for name in self.protocol.inputs:
            handles.append(children[name].register_forward_pre_hook(partial(self._widen, name), prepend=True))
            handles.append(children[name].register_forward_hook(partial(self._narrow, name)))
        if self.protocol.output is not None:
            child = children[self.protocol.output]
            handles.append(child.register_forward_pre_hook(self._read_rest, prepend=True))

    @property
    def _own_reading(self) -> _Reading | None:
        """The forward under way; None in another thread, whose forward runs through the same modules."""
        return self._reading if self._thread == threading.get_ident() else None

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give the mixer the first token alone, and a cache of its own."""
        states, mixer = self.states, self.mixer
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        if not states.is_stepping or arguments.get(mixer.cache_name) is not states.cache:
            return None
        if self.protocol.reads_columns and states.num_skipped is None:
            return None
        hidden = arguments.pop(mixer.hidden_name)
        real = states.histories[mixer.layer_index]
        layer = StepLayer(real.layer.number_of_states)
        arguments |= dict.fromkeys(mixer.mask_names)
        arguments[mixer.cache_name] = Cache(layers=[layer] * (mixer.layer_index + 1))
        before = {slot: state for slot, state in real.current.items() if slot in self.protocol.slots}
        reading = _Reading(hidden, arguments, layer, before)
        self._load(layer, before)
        if self.protocol.prepared is not None:
            reading.prepared = self._given_first(self.protocol.prepared, {mixer.hidden_name: hidden, **arguments})
            self._load(layer, before)
        self._reading, self._thread = reading, threading.get_ident()
        return (), {mixer.hidden_name: reading.tokens[0], **arguments}

    def _widen(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Let an input child read all tokens."""
        reading = self._own_reading
        if reading is None or not args:
            return None
        whole = reading.prepared if name == self.protocol.prepared else reading.whole.get(id(args[0]), (None, None))[1]
        if whole is None:
            return None
        reading.widened = name
        return whole, *args[1:]

    def _narrow(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Hand the mixer what the child made of the first token."""
        reading = self._own_reading
        if reading is None or reading.widened != name:
            return None
        reading.widened = ""
        reading.held[name] = _by_token(output)
        first = reading.held[name][0]
        reading.whole[id(first)] = first, output
        return first

    def _read_rest(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Let the copy read the other tokens, and the output child all of them."""
        reading = self._own_reading
        if reading is None or reading.states:
            return None
        return torch.cat(self._rest(reading, args[0]), dim=1), *args[1:]

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Note the states after each token; without an output child, return what belongs to all tokens."""
        reading = self._own_reading
        if reading is None:
            return None
        self._reading = None
        if output is None:  # an error is on its way
            return None
        if not reading.states:
            output = _joined(self._rest(reading, output))
        replay = None if self.states.keeps else partial(self._replay, reading)
        self.states.histories[self.mixer.layer_index].records.append(ModuleStates(reading.states, replay))
        return output

    def _rest(self, reading: _Reading, first: Any) -> list[Any]:
        """What the output child reads, or the mixer returns, by token; states are noted."""
        found = [first]
        self._note(reading)
        for number in range(1, len(reading.tokens)):
            self._load(reading.layer, reading.before)
            found.append(self._step(reading, number))
            self._note(reading)
        return found

    def _step(self, reading: _Reading, number: int) -> Any:
        """Let the copy read one token, from the states that the layer holds."""
        for name, stand_in in self._inputs.items():
            stand_in.output = reading.held[name][number]
        arguments = {self.mixer.hidden_name: reading.tokens[number], **reading.arguments}
        output = type(self.mixer.module).forward(self._copy, **arguments)
        return output if self._output is None else self._output.taken()

    def _given_first(self, name: str, arguments: dict[str, Any]) -> Tensor | None:
        """What the mixer gives its first child for all tokens; it does not come further."""
        self._inputs[name].output = None
        try:
            type(self.mixer.module).forward(self._copy, **arguments)
        except _Reached as reached:
            return reached.given
        return None

    def _note(self, reading: _Reading) -> None:
        number = len(reading.states)
        is_last = number + 1 == len(reading.tokens)
        reading.before = self._after(reading.layer, number, reading.before)
        reading.states.append(reading.before if self.states.keeps or is_last else {})

    def _replay(self, reading: _Reading, number: int, before: States) -> States:
        """The states after a token, from those before it."""
        self._load(reading.layer, before)
        self._step(reading, number)
        return self._after(reading.layer, number, before)

    def _load(self, layer: StepLayer, states: States) -> None:
        """Let the layer hold states that may be written to."""
        is_written = {"conv": True, "recurrent": self.protocol.writes_recurrent}
        own = {slot: state for slot, state in states.items() if slot in self.protocol.slots}
        layer.load({slot: state.clone() if is_written[slot.kind] else state for slot, state in own.items()})

    def _after(self, layer: StepLayer, number: int, before: States) -> States:
        """The layer's states after a token; of rows that had read it already, those before."""
        after: Mapping[Slot, Tensor] = states_of(layer)
        skips = self.states.num_skipped
        if skips is None or number >= max(skips):
            return after
        is_skipped = [number < skip for skip in skips]
        return {slot: _where(is_skipped, before[slot], state) for slot, state in after.items()}


class StandIn(nn.Module):
    """Takes the place of a child in a copy of its parent, whose other attributes it passes on."""

    def __init__(self, child: nn.Module):
        super().__init__()
        vars(self)["child"] = child  # not a child of this module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["child"], name)


class _Reached(Exception):  # no error
    """Ends a forward at a child."""

    def __init__(self, given: Tensor):
        super().__init__()
        self.given = given


class _Held(StandIn):
    """Returns what it is told to; told nothing, it ends the forward."""

    output: Tensor | None = None

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.output is None:
            raise _Reached(inputs)
        return self.output


class _Seen(StandIn):
    """Keeps what it is given."""

    seen: Tensor | None = None

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = inputs
        return inputs

    def taken(self) -> Tensor | None:
        """What it was given last, which it lets go."""
        seen, self.seen = self.seen, None
        return seen


def _by_token(hidden: Tensor) -> tuple[Tensor, ...]:
    """Q contiguous [B, 1, ...] of [B, Q, ...]."""
    by_token = hidden.transpose(0, 1) if hidden.shape[0] == 1 else hidden.transpose(0, 1).contiguous()
    return tuple(token[:, None] for token in by_token.unbind(0))


def _joined(outputs: list[Any]) -> Any:
    """What a mixer returned for each token, as it returns all of them: [B, Q, ...], or a tuple of them."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, dim=1)
    return tuple(_joined(list(parts)) for parts in zip(*outputs, strict=True))


def _where(is_kept: list[bool], before: Tensor, after: Tensor) -> Tensor:
    """Rows of `before` where a flag is set, else of `after`."""
    flags = torch.tensor(is_kept, device=after.device).view(-1, *[1] * (after.ndim - 1))
    return torch.where(flags, before, after)
