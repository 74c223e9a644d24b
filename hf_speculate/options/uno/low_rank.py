"""Low-rank layers: add an adapter to a target's linear layers, for chosen tokens of one forward.

Forward hooks add s B A x to the outputs. They are on the modules during one forward only, and act
in its thread alone. No weight of the target is written to.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from hf_speculate.errors import UnsupportedModelError, shown
from hf_speculate.models.language_model import device_of, dtype_of, module_device
from hf_speculate.models.module_walk import weight_bytes
from hf_speculate.models.text_decoder import text_decoder
from hf_speculate.options.uno.weights import AdapterWeights, LowRank

_STATE_NDIM = 3  # rows, tokens, width
_PARTS = ("self_attn", "mlp")


class LowRankLayers:
    """An adapter over the linear layers of its target.

    Weights are in the target's dtype, each on the device of its layer. B includes the scale.

    Args:
        weights: The adapter.
        target: The model.
        name: Name of the adapter, for errors.

    Raises:
        UnsupportedModelError: layers or shapes do not fit the target.
    """

    def __init__(self, weights: AdapterWeights, target: PreTrainedModel, name: str):
        modules = _linear_layers(target, weights.config.target_modules)
        if problems := _problems(weights, modules):
            base = f", an adapter of {weights.config.base_name}" if weights.config.base_name else ""
            raise UnsupportedModelError(
                f"a Uno adapter must fit its target {type(target).__name__}, got {name}{base}: "
                f"{'; '.join(problems)}; load the base model of the adapter as the target"
            )
        dtype, device = dtype_of(target), device_of(target)
        self._pairs = {
            layer: _placed(pair, weights.config.scale, dtype, module_device(modules[layer], device))
            for layer, pair in weights.layers.items()
        }
        self._target_modules = weights.config.target_modules

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(weight_bytes(side) for pair in self._pairs.values() for side in pair)

    @contextmanager
    def added_after_first(self, target: PreTrainedModel) -> Iterator[None]:
        """Add the adapter to all tokens but the first of each row, in one forward of the target.

        Raises:
            UnsupportedModelError: the forward does not call its linear layers.
        """
        modules = _linear_layers(target, self._target_modules)
        thread, called, handles = threading.get_ident(), set[str](), []

        def hook(layer: str) -> Any:
            def add(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
                if threading.get_ident() != thread:
                    return None
                called.add(layer)
                return _added_after_first(self._pairs[layer], args[0], output)

            return add

        try:
            for layer, module in modules.items():
                handles.append(module.register_forward_hook(hook(layer)))
            yield
        finally:
            for handle in handles:
                handle.remove()
        if lacking := self._pairs.keys() - called:
            raise UnsupportedModelError(
                "the target's forward must call its linear layers, got no call of "
                f"{shown(lacking)} in {type(target).__name__}; remove what replaces them"
            )


def _added_after_first(pair: LowRank, states: Tensor, output: Tensor) -> Tensor:
    """Add B A x to all but the first token of output [B, Q, out], from states [B, Q, in]."""
    if states.ndim != _STATE_NDIM:
        raise UnsupportedModelError(
            "linear layers of a Uno adapter must read one vector for each token, got the shape "
            f"{list(states.shape)}; decode with another draft"
        )
    noise_states = states[:, 1:].to(pair.down.dtype)  # of the first one, NaN times 0 would be NaN
    added = linear(linear(noise_states, pair.down), pair.up)  # [B, Q - 1, out]
    return output + pad(added, (0, 0, 1, 0)).to(output.dtype)


def _linear_layers(target: PreTrainedModel, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the target's linear layers, by name in the decoder."""
    modules = {}
    decoder: Any = text_decoder(target)
    for index, layer in enumerate(getattr(decoder, "layers", ())):
        for part in _PARTS:
            for name in names:
                module = getattr(getattr(layer, part, None), name, None)
                if isinstance(module, nn.Module):
                    modules[f"layers.{index}.{part}.{name}"] = module
    return modules


def _problems(weights: AdapterWeights, modules: dict[str, nn.Module]) -> list[str]:
    """Return reasons against an adapter for these modules; empty if it fits."""
    problems = []
    if surplus := weights.layers.keys() - modules.keys():
        problems.append(f"the target has no {shown(surplus)}")
    if lacking := modules.keys() - weights.layers.keys():
        problems.append(f"the adapter has no {shown(lacking)}")
    if not weights.layers:
        problems.append("the adapter has no weights")
    for layer in sorted(weights.layers.keys() & modules.keys()):
        module: Any = modules[layer]
        rank, (down, up) = weights.config.rank, weights.layers[layer]
        sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if None not in sizes and [*down.shape, *up.shape] != [rank, sizes[0], sizes[1], rank]:
            problems.append(
                f"{layer} maps {sizes[0]} numbers to {sizes[1]} with rank {rank}, and A and B are "
                f"{list(down.shape)} and {list(up.shape)}"
            )
            break
    return problems


def _placed(pair: LowRank, scale: float, dtype: torch.dtype, device: torch.device) -> LowRank:
    """Return the weights in a dtype on a device, with the scale in B."""
    up = (pair.up.to(device, torch.promote_types(pair.up.dtype, torch.float32)) * scale).to(dtype)
    return LowRank(pair.down.to(device, dtype), up)
