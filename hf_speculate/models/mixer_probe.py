"""Mixer probe: runs a mixer on a few tokens to find its projections and states, and checks it under hooks."""

import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, LinearAttentionLayer

from hf_speculate.cache.recurrent import RecurrentStates, States, states_of
from hf_speculate.models.mixer_steps import Mixer, StepLayer, SteppedMixer, StepProtocol, copy_with

_NUM_ROWS, _NUM_PREFIX, _NUM_STEPS = 2, 2, 3
# Relative to the largest number. A projection of several tokens rounds differently from one of a single token, and some
# state functions compute in float32 for every dtype. Wrong states differ by a tenth or more.
_TOLERANCE = 1e-3
_ROUNDINGS = 16.0  # units of rounding; the tolerance of coarse dtypes
_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError)

_lock = threading.Lock()
_known: "WeakKeyDictionary[nn.Module, StepProtocol | str]" = WeakKeyDictionary()


class _Steps(NamedTuple):
    output: Tensor  # [B, Q, N], see `_flat`
    states: Sequence[States]  # after each token
    writes_recurrent: bool


def probed(mixer: Mixer, num_states: int) -> StepProtocol | str:
    """The protocol of a mixer whose cache layer may hold `num_states` of each kind; a reason if there is none."""
    with _lock:
        known = _known.get(mixer.module)
    if known is not None:
        return known
    try:
        with torch.no_grad():
            found = _probe(mixer, num_states)
    except _ERRORS as error:
        found = f"cannot be run with hidden states and a cache only ({type(error).__name__}: {error})"
    with _lock:
        _known[mixer.module] = found
    return found


def _probe(mixer: Mixer, num_states: int) -> StepProtocol | str:
    hidden = _made_up(mixer.module)
    tokens = hidden[:, _NUM_PREFIX:]
    layer = StepLayer(num_states)
    _run(mixer, mixer.module, hidden[:, :_NUM_PREFIX], layer)
    before = states_of(layer)
    is_short = bool(before) and not any(slot.kind == "recurrent" for slot in before)
    num_bytes = sum(state.numel() * state.element_size() for state in before.values()) // _NUM_ROWS
    protocol = StepProtocol(frozenset(before), frozenset(), None, None, True, is_short, num_bytes)
    if not before:
        return protocol
    steps = _step_by_step(mixer, tokens, before)
    protocol = _with_children(protocol, mixer, tokens[:, :1], before)
    if hidden.is_meta:
        return protocol
    at_once = _flat(_run(mixer, mixer.module, tokens, _loaded(before)))
    agrees = _is_close(at_once, steps.output)
    protocol = protocol._replace(writes_recurrent=steps.writes_recurrent, reads_at_once=agrees)
    if protocol.prepared is not None and not _holds(protocol, mixer, tokens, before, steps):
        protocol = protocol._replace(inputs=protocol.inputs - {protocol.prepared}, prepared=None)
    if not _holds(protocol, mixer, tokens, before, steps):
        return "gives other outputs or states under hooks than token by token"
    return protocol


def _holds(protocol: StepProtocol, mixer: Mixer, tokens: Tensor, before: States, steps: _Steps) -> bool:
    """Whether a mixer under hooks gives the outputs and states of single tokens, with states kept and replayed."""
    for max_kept_bytes in (1 << 60, -1):
        outputs, states = _hooked(mixer, protocol, tokens, before, max_kept_bytes)
        pairs = [(outputs, steps.output)]
        for number, found in states.items():
            pairs += [(found[slot], steps.states[number][slot]) for slot in protocol.slots]
        if not all(_is_close(*pair) for pair in pairs):
            return False
    return True


def _made_up(module: nn.Module) -> Tensor:
    """Synthetic hidden states [B, T, D] in the dtype and on the device of the convolution."""
    conv = next(child for child in module.children() if isinstance(child, nn.Conv1d))
    width = getattr(module, "hidden_size", conv.in_channels)
    numbers = torch.arange(_NUM_ROWS * (_NUM_PREFIX + _NUM_STEPS) * width, dtype=torch.float64, device="cpu").sin()
    return numbers.view(_NUM_ROWS, -1, width).to(conv.weight.device, conv.weight.dtype)


def _run(mixer: Mixer, module: nn.Module, hidden: Tensor, layer: LinearAttentionLayer) -> Any:
    cache = Cache(layers=[layer] * (mixer.layer_index + 1))
    arguments = {mixer.hidden_name: hidden, mixer.cache_name: cache, **dict.fromkeys(mixer.mask_names)}
    return type(mixer.module).forward(module, **arguments)


def _loaded(states: States) -> StepLayer:
    layer = StepLayer(1 + max(slot.number for slot in states))
    layer.load({slot: state.clone() for slot, state in states.items()})
    return layer


def _step_by_step(mixer: Mixer, tokens: Tensor, before: States) -> _Steps:
    outputs, states = [], []
    writes_recurrent = False
    for token in tokens.split(1, dim=1):
        layer = _loaded(before)
        given = states_of(layer)
        outputs.append(_flat(_run(mixer, mixer.module, token, layer)))
        for slot, state in given.items():
            if slot.kind == "recurrent" and not state.is_meta:
                writes_recurrent |= not torch.equal(state, before[slot])
        before = states_of(layer)
        states.append(before)
    return _Steps(torch.cat(outputs, dim=1), states, writes_recurrent)


def _with_children(protocol: StepProtocol, mixer: Mixer, token: Tensor, before: States) -> StepProtocol:
    """The protocol with the input and output projections, found by watching calls of the children."""
    calls: list[tuple[str, Any, Any]] = []

    def watched(name: str, child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = child(*args, **kwargs)
        calls.append((name, args[0] if args else None, made))
        return made

    twin = copy_with(
        mixer.module, {name: partial(watched, name, child) for name, child in mixer.module.named_children()}
    )
    result = _run(mixer, twin, token, _loaded(before))
    counts = Counter(name for name, _, _ in calls)
    single = [call for call in calls if counts[call[0]] == 1 and all(isinstance(part, Tensor) for part in call[1:])]
    shared = {id(token)}
    inputs = set()
    prepared = None
    for name, given, made in single:
        if given.shape[:2] != token.shape[:2] or made.shape[:2] != token.shape[:2]:
            continue
        if name == calls[0][0] and id(given) not in shared:
            prepared = name
        if name == prepared or id(given) in shared:
            inputs.add(name)
            shared.add(id(made))
    last = [name for name, _, made in single if made is result and name not in inputs]
    return protocol._replace(inputs=frozenset(inputs), prepared=prepared, output=last[0] if last else None)


def _hooked(
    mixer: Mixer, protocol: StepProtocol, tokens: Tensor, before: States, max_kept_bytes: int
) -> tuple[Tensor, dict[int, States]]:
    """The mixer's output under hooks, and its states after the first and after the last token."""
    states: dict[int, States] = {}
    for number in (0, _NUM_STEPS - 1):
        layer = _loaded(before)
        cache = Cache(layers=[*[StepLayer(0)] * mixer.layer_index, layer])
        recurrent = RecurrentStates(cache, max_kept_bytes)
        handles: list[RemovableHandle] = []
        try:
            SteppedMixer(mixer, protocol._replace(reads_at_once=False), recurrent).attach(handles)
            recurrent.begin(tokens.shape[1], is_prompt=False)
            output = mixer.module(**{mixer.hidden_name: tokens, mixer.cache_name: cache})
            recurrent.end(tokens.shape[1])
        finally:
            for handle in handles:
                handle.remove()
        recurrent.roll_back([number + 1] * _NUM_ROWS)
        states[number] = states_of(layer)
    return _flat(output), states


def _flat(output: Any) -> Tensor:
    """A mixer's output [B, Q, ...], or a tuple of outputs concatenated, as [B, Q, N]."""
    parts: Sequence[Tensor] = [output] if isinstance(output, Tensor) else output
    return torch.cat([part.flatten(2) for part in parts], dim=2)


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = max(_TOLERANCE, _ROUNDINGS * torch.finfo(one.dtype).eps)
    return bool((one - other).abs().max() <= tolerance * other.abs().max())
