"""Stepped mixers: hooks make a mixer read tokens one by one, after projecting all at once."""

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, LinearAttentionLayer

from hf_speculate.options.recurrent.states import (
    ModuleStates,
    RecurrentStates,
    Slot,
    States,
    put_states,
    states_of,
)


class Mixer(NamedTuple):
    """A module with states in a cache layer, with its layer index and argument names."""

    module: nn.Module
    layer_index: int
    hidden_name: str  # [B, Q, D]
    cache_name: str
    mask_names: tuple[str, ...]


class StepProtocol(NamedTuple):
    """Properties of a mixer class, found by probing."""

    slots: frozenset[Slot]  # slots of its states
    inputs: frozenset[str]  # input projections: children that read the token or a child's output
    prepared: str | None  # the first input projection if its input is computed from the token
    output: str | None  # output projection: the child that returns the mixer's output
    writes_recurrent: bool  # whether recurrent states are updated in place
    reads_at_once: bool  # whether one forward over several tokens gives the states of single steps
    num_bytes: int  # size of one row's states in bytes
    continues: bool = True  # whether two forwards give the same states as one

    @property
    def reads_columns(self) -> bool:
        """Whether it reads several tokens at once and has only croppable convolution states."""
        return self.reads_at_once and not any(slot.type == "recurrent" for slot in self.slots)


class StandIn(nn.Module):
    """A function in place of a child module.

    Other attributes are those of the child. It is used in a copy of the parent.
    """

    def __init__(self, child: nn.Module, function: Callable[..., Any]):
        super().__init__()
        vars(self).update(child=child, forward=function)  # not registered as a child module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["child"], name)


def copy_with(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> nn.Module:
    """Return a shallow copy of a module in which functions replace some children."""
    copied = copy.copy(module)
    children = dict(module.named_children())
    stand_ins = {name: StandIn(children[name], function) for name, function in functions.items()}
    vars(copied)["_modules"] = {**vars(copied)["_modules"], **stand_ins}
    return copied


@contextmanager
def loaded_weights(module: nn.Module) -> Iterator[None]:
    """Load the offloaded weights of a module and its children within the context.

    accelerate holds them on another device or on disk.
    """
    with ExitStack() as loaded:
        for submodule in module.modules():
            if _is_offloaded(submodule):
                hook: Any = submodule._hf_hook
                # even if the next line raises an error
                loaded.callback(hook.post_forward, submodule, None)
                hook.pre_forward(submodule)
        yield


def _is_offloaded(module: nn.Module) -> bool:
    """Return whether a module's weights are loaded by a hook and are not loaded now."""
    return "_hf_hook" in vars(module) and any(
        weight is not None and weight.is_meta for weight in module._parameters.values()
    )


class _StopForward(Exception):  # not an error
    """Stops a forward at a projection and carries the projection's input."""


def _projection_output(
    outputs: dict[str, Tensor], name: str, inputs: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Return the stored output of an input projection; runs in the copy of a mixer."""
    if name not in outputs:
        raise _StopForward(inputs)
    return outputs[name]


class StepLayer(LinearAttentionLayer):
    """A cache layer that stores new states without copying them."""

    def load(self, states: States) -> None:
        """Store the given tensors themselves as the states."""
        put_states(self, states)
        for slot, state in states.items():
            self.has_previous_state[slot.number] = True
            if slot.type == "conv":
                self.is_conv_states_initialized[slot.number] = True
                self.conv_kernel_size[slot.number] = state.shape[-1]
            else:
                self.is_recurrent_states_initialized[slot.number] = True

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Store a new state in the dtype of the previous one."""
        previous = self.recurrent_states[state_idx]
        state = recurrent_states if previous is None else recurrent_states.to(previous.dtype)
        self.recurrent_states[state_idx] = state
        self.is_recurrent_states_initialized[state_idx] = True
        return state


class _Forward:
    def __init__(self, hidden: Tensor, arguments: dict[str, Any], layer: StepLayer, before: States):
        self.tokens = _by_token(hidden)
        self.arguments = arguments  # except for the hidden states
        self.layer = layer
        self.before = before  # the states before the first token
        # outputs of each input projection, per token
        self.outputs: dict[str, tuple[Tensor, ...]] = {}
        # tensors of all tokens, by the id of the first token's tensor
        self.whole = {id(self.tokens[0]): (self.tokens[0], hidden)}
        self.prepared: Tensor | None = None  # input of the first projection, for all tokens
        self.projecting = ""  # name of the running input projection
        self.states: list[States] = []


class SteppedMixer:
    """Hooks on a mixer for one cache.

    They are active in forwards that may be rolled back. Weights are read once for all tokens.
    Everything between the projections runs token by token, so the states after each token are
    known::

        hidden [B, Q, D]
            | _feed_first_token  calls the mixer with token 0 alone, and a cache layer of its own
            v
        input projections      _project_all: each reads all Q tokens
            |                  _hand_out_first: returns the output for token 0
            +-- token 0 ------> the mixer itself -------------------------> states after token 0
            +-- tokens 1..Q-1 > its copy, one by one (_step_through_rest) > states after each
            v
        output projection      _run_rest: calls _step_through_rest, and reads all Q tokens
            | _record_states     records the states; without an output projection, joins the outputs
            v
        output [B, Q, D]

    The copy is shallow. Its input projections return the mixer's projected values for one token.
    Its output projection returns its input unchanged.
    """

    def __init__(self, mixer: Mixer, protocol: StepProtocol, states: RecurrentStates):
        self.mixer = mixer
        self.protocol = protocol
        self.states = states
        self._names = list(inspect.signature(type(mixer.module).forward).parameters)[1:]
        # Outputs of the copy's input projections for one token, updated in place. The copy does not
        # refer to this object, so the cache is freed with the call.
        self._token_outputs: dict[str, Tensor] = {}
        functions: dict[str, Callable[..., Any]] = {
            name: partial(_projection_output, self._token_outputs, name) for name in protocol.inputs
        }
        if protocol.output is not None:
            functions[protocol.output] = lambda inputs, *args, **kwargs: inputs
        self._copy = copy_with(mixer.module, functions)
        self._forward: _Forward | None = None
        self._thread = 0

    def attach(self, handles: list[RemovableHandle]) -> None:
        """Register the hooks and append their handles to `handles`."""
        module = self.mixer.module
        children = dict(module.named_children())
        handles.append(module.register_forward_pre_hook(self._feed_first_token, with_kwargs=True))
        handles.append(
            module.register_forward_hook(self._record_states, prepend=True, always_call=True)
        )
        for name in self.protocol.inputs:
            handles.append(
                children[name].register_forward_pre_hook(
                    partial(self._project_all, name), prepend=True
                )
            )
            handles.append(
                children[name].register_forward_hook(partial(self._hand_out_first, name))
            )
        if self.protocol.output is not None:
            child = children[self.protocol.output]
            handles.append(child.register_forward_pre_hook(self._run_rest, prepend=True))

    @property
    def _own_forward(self) -> _Forward | None:
        """The current forward of this thread; None in other threads with the same modules."""
        return self._forward if self._thread == threading.get_ident() else None

    def _feed_first_token(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pass only the first token to the mixer, with a separate cache."""
        states, mixer = self.states, self.mixer
        if kwargs is None:  # forward of another thread while torch adds or removes this hook
            return None
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        if not states.is_stepping or arguments.get(mixer.cache_name) is not states.cache:
            return None
        if self.protocol.reads_columns and states.num_skipped is None:
            return None
        hidden = arguments.pop(mixer.hidden_name)
        history = states.histories[mixer.layer_index]
        layer = StepLayer(history.layer.number_of_states)
        arguments |= dict.fromkeys(mixer.mask_names)
        arguments[mixer.cache_name] = Cache(layers=[layer] * (mixer.layer_index + 1))
        forward = _Forward(hidden, arguments, layer, history.current)
        if self.protocol.prepared is not None:
            self._load(layer, forward.before)
            forward.prepared = self._first_input({mixer.hidden_name: hidden, **arguments})
        self._load(layer, forward.before)
        self._forward, self._thread = forward, threading.get_ident()
        return (), {mixer.hidden_name: forward.tokens[0], **arguments}

    def _project_all(
        self, name: str, module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        forward = self._own_forward
        if forward is None or not args:
            return None
        whole = (
            forward.prepared
            if name == self.protocol.prepared
            else forward.whole.get(id(args[0]), (None, None))[1]
        )
        if whole is None:
            return None
        forward.projecting = name
        return whole, *args[1:]

    def _hand_out_first(
        self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> Tensor | None:
        forward = self._own_forward
        if forward is None or forward.projecting != name:
            return None
        forward.projecting = ""
        forward.outputs[name] = _by_token(output)
        first = forward.outputs[name][0]
        forward.whole[id(first)] = first, output
        return first

    def _run_rest(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Run the copy on the other tokens, and the output projection on all tokens."""
        forward = self._own_forward
        if forward is None or forward.states:
            return None
        return torch.cat(self._step_through_rest(forward, args[0]), dim=1), *args[1:]

    def _record_states(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Record the states after each token.

        Without an output projection, return the output of all tokens.
        """
        forward = self._own_forward
        if forward is None:
            return None
        self._forward = None
        if output is None:  # the forward raised an error
            return None
        if not forward.states:
            output = _joined(self._step_through_rest(forward, output))
        replay = None if self.states.keeps else partial(self._replay, forward)
        self.states.histories[self.mixer.layer_index].records.append(
            ModuleStates(forward.states, replay)
        )
        return output

    def _step_through_rest(self, forward: _Forward, first: Any) -> list[Any]:
        """Record states; return each token's input to the output projection or mixer output."""
        outputs, states = [first], self._after(forward, 0, forward.before)
        with loaded_weights(self._copy):  # without the projections, which have read all tokens
            for number in range(1, len(forward.tokens)):
                forward.states.append(states if self.states.keeps else {})
                output, states = self._step(forward, number, states)
                outputs.append(output)
        forward.states.append(states)
        return outputs

    def _replay(self, forward: _Forward, number: int, before: States) -> States:
        """Recompute the states after a token from those before it."""
        with loaded_weights(self._copy):
            return self._step(forward, number, before)[1]

    def _step(self, forward: _Forward, number: int, before: States) -> tuple[Any, States]:
        """Return the copy's output for one token, and the states after it."""
        self._load(forward.layer, before)
        self._token_outputs.update(
            {name: by_token[number] for name, by_token in forward.outputs.items()}
        )
        arguments = {self.mixer.hidden_name: forward.tokens[number], **forward.arguments}
        output = type(self.mixer.module).forward(self._copy, **arguments)
        return output, self._after(forward, number, before)

    def _first_input(self, arguments: dict[str, Any]) -> Tensor | None:
        """Return the input of the first input projection for all tokens."""
        self._token_outputs.clear()
        try:
            with loaded_weights(self._copy):
                type(self.mixer.module).forward(self._copy, **arguments)
        except _StopForward as reached:
            return reached.args[0]  # type: ignore[no-any-return]
        return None

    def _load(self, layer: StepLayer, states: States) -> None:
        """Load states into the layer; copy states that are updated in place."""
        is_written = {"conv": True, "recurrent": self.protocol.writes_recurrent}
        selected = {slot: state for slot, state in states.items() if slot in self.protocol.slots}
        layer.load(
            {
                slot: state.clone() if is_written[slot.type] else state
                for slot, state in selected.items()
            }
        )

    def _after(self, forward: _Forward, number: int, before: States) -> States:
        """Return the layer's states after a token; rows with a repeated token keep theirs."""
        after, skips = states_of(forward.layer), self.states.num_skipped
        if skips is not None and number < max(skips):
            for slot, state in after.items():
                is_skipped = torch.tensor([number < skip for skip in skips], device=state.device)
                after[slot] = torch.where(
                    is_skipped.view(-1, *[1] * (state.ndim - 1)), before[slot], state
                )
        return after


def _by_token(hidden: Tensor) -> tuple[Tensor, ...]:
    """Split [B, Q, ...] into Q contiguous tensors [B, 1, ...]."""
    by_token = (
        hidden.transpose(0, 1) if hidden.shape[0] == 1 else hidden.transpose(0, 1).contiguous()
    )
    return tuple(token[:, None] for token in by_token.unbind(0))


def _joined(outputs: list[Any]) -> Any:
    """Join the outputs for single tokens to one output [B, Q, ...], or to a tuple of outputs."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, dim=1)
    return tuple(_joined(list(elements)) for elements in zip(*outputs, strict=True))
