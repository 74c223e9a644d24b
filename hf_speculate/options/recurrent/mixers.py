"""Find the mixers of a model: its modules with recurrent states, probed for stepping.

The probe runs a mixer on a few tokens to find its projections and states, then checks the mixer
under hooks.
"""

import inspect
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from hf_speculate.model_state import model_state
from hf_speculate.models.language_model import cache_name, module_device
from hf_speculate.options.recurrent.mixer_steps import (
    Mixer,
    StepLayer,
    SteppedMixer,
    StepProtocol,
    copy_with,
    loaded_weights,
)
from hf_speculate.options.recurrent.states import RecurrentStates, States, states_of

# Layer types whose recurrent cache layer is empty in older versions of transformers.
_WITHOUT_STATES = ("mlp", "moe")

_HOOKS = "accelerate.hooks"  # module of the hooks for offloaded weights
_NUM_ROWS, _NUM_PREFIX, _NUM_STEPS = 2, 2, 3
# Relative to the largest number. Projections of several tokens and of a single token are rounded
# differently, and some state functions compute in float32 for every dtype. Wrong states differ by
# 0.1 or more.
_TOLERANCE = 1e-3
_ROUNDINGS = 16.0  # tolerance for coarse dtypes, in units of rounding
_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    KeyError,
    IndexError,
    NotImplementedError,
)


class SteppedModel(NamedTuple):
    """A model's mixers with their protocols."""

    mixers: Sequence[tuple[Mixer, StepProtocol]]
    obstacle: str  # why their states cannot be rolled back; empty if they can

    @property
    def num_bytes(self) -> int:
        return sum(protocol.num_bytes for _, protocol in self.mixers)

    @property
    def reads_at_once(self) -> bool:
        """Whether one forward over several tokens gives the states of single steps in every mixer.

        The comparison starts from earlier states.
        """
        return all(protocol.reads_at_once for _, protocol in self.mixers)

    @property
    def continues(self) -> bool:
        """Whether all mixers continue from earlier states when reading several tokens at once."""
        return all(protocol.continues for _, protocol in self.mixers)


def stepped_model(model: PreTrainedModel, cache: Cache) -> SteppedModel:
    """Find and probe the mixers of a model from the layers of its cache."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    pairs: list[tuple[Mixer, StepProtocol]] = []
    protocols: dict[Any, StepProtocol | str] = {}
    devices: set[Any] = set()
    mixers = _mixers_by_layer(model)
    for index, layer in enumerate(cache.layers):
        is_empty = index < len(types) and types[index] in _WITHOUT_STATES
        if is_empty or not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        num_before = len(pairs)
        for mixer in mixers[index]:
            if reason := _replaced_forward(mixer.module, devices):
                return _unserved(mixer, reason)
            mixer_type = type(mixer.module), _numbers_of(mixer.module)
            protocol = protocols.get(mixer_type) or _probed(mixer, layer.number_of_states)
            protocols[mixer_type] = protocol
            if isinstance(protocol, str):
                return _unserved(mixer, protocol)
            if protocol.slots:
                pairs.append((mixer, protocol))
        if len(pairs) == num_before:
            return SteppedModel([], f"whose layer {index} does not keep its states in the cache")
    return SteppedModel(pairs, "")


def rollback_obstacle(model: PreTrainedModel, cache: Cache) -> str:
    """Return why a cache's recurrent layers cannot be rolled back; empty if they can."""
    if (getattr(model, "tp_size", None) or 1) > 1:
        return "and is split by tensor parallelism, which is not supported for recurrent layers"
    if any(vars(module).get("_compiled_call_impl") is not None for module in model.modules()):
        return "and is compiled in place, which prevents hooks on its modules"
    return stepped_model(model, cache).obstacle


def _mixers_by_layer(model: PreTrainedModel) -> dict[int, list[Mixer]]:
    """Find modules with a convolution, hidden states, a cache and a layer index, by layer."""
    mixers: dict[int, list[Mixer]] = defaultdict(list)
    for module in model.modules():
        index = vars(module).get("layer_idx")
        if not isinstance(index, int) or not any(
            isinstance(child, nn.Conv1d) for child in module.children()
        ):
            continue
        hidden, *others = list(inspect.signature(type(module).forward).parameters.values())[1:]
        cache = cache_name(module)
        needed: list[Any] = [
            parameter
            for parameter in others
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        ]
        if cache and all(parameter.name == cache for parameter in needed):
            masks = tuple(parameter.name for parameter in others if "mask" in parameter.name)
            mixers[index].append(Mixer(module, index, hidden.name, cache, masks))
    return mixers


def _numbers_of(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return sizes, flags and the state's index; equal modules of a class share a protocol."""
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, int) and name != "layer_idx"
    )


def _unserved(mixer: Mixer, why: str) -> SteppedModel:
    return SteppedModel([], f"whose {type(mixer.module).__name__} {why}")


def _replaced_forward(module: nn.Module, devices: set[Any]) -> str:
    """Return why an instance's own forward cannot be stepped; empty if it can.

    Only accelerate's forward can be stepped, because it loads an offloaded module's weights and
    then runs the forward of the class.

    Args:
        module: a mixer.
        devices: accelerate's devices for earlier mixers; the device of this mixer is added.
    """
    replaced, hook = vars(module).get("forward"), vars(module).get("_hf_hook")
    if replaced is None:
        return ""
    wrapped = getattr(vars(module).get("_old_forward"), "__func__", None)
    if type(hook).__module__ != _HOOKS or wrapped is not type(module).forward:
        return "has a replaced forward"
    devices.add(getattr(hook, "execution_device", None))
    return "" if len(devices) == 1 else "runs on another device than others of its kind"


class _Steps(NamedTuple):
    output: Tensor  # [B, Q, N], see `_flat`
    states: Sequence[States]  # after each token
    writes_recurrent: bool


def _probed(mixer: Mixer, num_states: int) -> StepProtocol | str:
    """Return the remembered protocol of a mixer, or the reason why it has none.

    `num_states` is the number of states of each kind in its cache layer.
    """
    return model_state(mixer.module).get(StepProtocol, partial(_probe, mixer, num_states))


def _probe(mixer: Mixer, num_states: int) -> StepProtocol | str:
    try:
        with torch.no_grad():
            return _find_protocol(mixer, num_states)
    except _ERRORS as error:
        return (
            f"cannot be run with hidden states and a cache only ({type(error).__name__}: {error})"
        )


def _find_protocol(mixer: Mixer, num_states: int) -> StepProtocol | str:
    hidden = _synthetic_states(mixer.module)
    tokens = hidden[:, _NUM_PREFIX:]
    layer = StepLayer(num_states)
    _run(mixer, mixer.module, hidden[:, :_NUM_PREFIX], layer)
    before = {slot: state.clone() for slot, state in states_of(layer).items()}
    is_short = bool(before) and not any(slot.type == "recurrent" for slot in before)
    num_bytes = sum(state.numel() * state.element_size() for state in before.values()) // _NUM_ROWS
    protocol = StepProtocol(frozenset(before), frozenset(), None, None, True, is_short, num_bytes)
    if not before:
        return protocol
    steps = _step_by_step(mixer, tokens, before)
    protocol = _with_children(protocol, mixer, tokens[:, :1], before)
    if hidden.is_meta:
        return protocol
    at_once = _flat(_run(mixer, mixer.module, tokens, _loaded(before)))
    whole = _flat(_run(mixer, mixer.module, hidden, StepLayer(num_states)))
    protocol = protocol._replace(
        writes_recurrent=steps.writes_recurrent,
        reads_at_once=_is_close(at_once, steps.output),
        continues=_is_close(whole[:, _NUM_PREFIX:], at_once),
    )
    if protocol.prepared is not None and not _holds(protocol, mixer, tokens, before, steps):
        protocol = protocol._replace(inputs=protocol.inputs - {protocol.prepared}, prepared=None)
    if not _holds(protocol, mixer, tokens, before, steps):
        return "gives other outputs or states under hooks than token by token"
    return protocol


def _holds(
    protocol: StepProtocol, mixer: Mixer, tokens: Tensor, before: States, steps: _Steps
) -> bool:
    """Return whether a mixer under hooks gives the outputs and states of single steps.

    Both stored and recomputed states are compared.
    """
    for max_kept_bytes in (1 << 60, -1):
        outputs, states = _hooked(mixer, protocol, tokens, before, max_kept_bytes)
        pairs = [(outputs, steps.output)]
        for number, after in states.items():
            pairs += [(after[slot], steps.states[number][slot]) for slot in protocol.slots]
        if not all(_is_close(*pair) for pair in pairs):
            return False
    return True


def _synthetic_states(module: nn.Module) -> Tensor:
    """Return hidden states [B, T, D] in the dtype and on the device of the convolution."""
    conv = next(child for child in module.children() if isinstance(child, nn.Conv1d))
    width = getattr(module, "hidden_size", conv.in_channels)
    numbers = torch.arange(
        _NUM_ROWS * (_NUM_PREFIX + _NUM_STEPS) * width, dtype=torch.float64, device="cpu"
    ).sin()
    return numbers.view(_NUM_ROWS, -1, width).to(
        module_device(module, conv.weight.device), conv.weight.dtype
    )


def _run(mixer: Mixer, module: nn.Module, hidden: Tensor, layer: LinearAttentionLayer) -> Any:
    cache = Cache(layers=[layer] * (mixer.layer_index + 1))
    arguments = {
        mixer.hidden_name: hidden,
        mixer.cache_name: cache,
        **dict.fromkeys(mixer.mask_names),
    }
    with loaded_weights(mixer.module):
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
        loaded = states_of(layer)
        outputs.append(_flat(_run(mixer, mixer.module, token, layer)))
        for slot, state in loaded.items():
            if slot.type == "recurrent" and not state.is_meta:
                writes_recurrent |= not torch.equal(state, before[slot])
        before = states_of(layer)
        states.append(before)
    return _Steps(torch.cat(outputs, dim=1), states, writes_recurrent)


def _with_children(
    protocol: StepProtocol, mixer: Mixer, token: Tensor, before: States
) -> StepProtocol:
    """Return the protocol with input and output projections, found by observing the children."""
    calls: list[tuple[str, Any, Any]] = []

    def watched(name: str, child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = child(*args, **kwargs)
        calls.append((name, args[0] if args else None, output))
        return output

    watched_copy = copy_with(
        mixer.module,
        {name: partial(watched, name, child) for name, child in mixer.module.named_children()},
    )
    result = _run(mixer, watched_copy, token, _loaded(before))
    counts = Counter(name for name, _, _ in calls)
    single = [
        call
        for call in calls
        if counts[call[0]] == 1 and all(isinstance(value, Tensor) for value in call[1:])
    ]
    shared = {id(token)}
    inputs = set()
    prepared = None
    for name, argument, output in single:
        if argument.shape[:2] != token.shape[:2] or output.shape[:2] != token.shape[:2]:
            continue
        if name == calls[0][0] and id(argument) not in shared:
            prepared = name
        if name == prepared or id(argument) in shared:
            inputs.add(name)
            shared.add(id(output))
    last = [name for name, _, output in single if output is result and name not in inputs]
    return protocol._replace(
        inputs=frozenset(inputs), prepared=prepared, output=last[0] if last else None
    )


def _hooked(
    mixer: Mixer, protocol: StepProtocol, tokens: Tensor, before: States, max_kept_bytes: int
) -> tuple[Tensor, dict[int, States]]:
    """Return the mixer's output under hooks, and its states after the first and last token."""
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
    """Flatten a mixer's output [B, Q, ...], or a tuple of outputs, to [B, Q, N]."""
    outputs: Sequence[Tensor] = [output] if isinstance(output, Tensor) else output
    return torch.cat([tensor.flatten(2) for tensor in outputs], dim=2)


def _is_close(actual: Tensor, other: Tensor) -> bool:
    if not actual.is_floating_point():
        return torch.equal(actual, other)
    are_numbers = other.isfinite()  # a draft model may have non-finite weights
    if not torch.equal(actual.isfinite(), are_numbers):
        return False
    tolerance = max(_TOLERANCE, _ROUNDINGS * torch.finfo(actual.dtype).eps)
    actual, other = actual.where(are_numbers, 0), other.where(are_numbers, 0)
    return bool((actual - other).abs().max() <= tolerance * other.abs().max())
