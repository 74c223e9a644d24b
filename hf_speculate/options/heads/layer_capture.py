"""Capture hidden states of chosen decoder layers with forward hooks.

transformers' `output_hidden_states` stores the states of all layers, numbers layers differently in
different versions, and lacks the state before the final norm.
"""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_speculate.errors import UnsupportedModelError

FINAL_STATE = -1  # the state after the final norm, read by the language modelling head
_LAYERS = ("layers", "h", "blocks")
STATE_NDIM = 3  # rows, tokens, width
_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f")


class LayerCapture:
    """A context for capturing hidden states.

    It captures the forwards of the current thread. Id i stands for the input of decoder layer i,
    the number of layers for the output of the last layer before the final norm, and `FINAL_STATE`
    for the state after the norm. `needs_all_tokens` is false if only a prompt's last token is read.

    Raises:
        UnsupportedModelError: the model's decoder layers or final norm cannot be found.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[int], needs_all_tokens: bool = True
    ):
        self.layers = tuple(layers)
        self.needs_all_tokens = needs_all_tokens
        self._name = type(model).__name__
        decoder = model.get_decoder()
        num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        modules = next(
            (children for children in _parts(decoder, _LAYERS) if len(children) == num_layers), None
        )
        norm = next(iter(_parts(decoder, _NORMS)), None)
        if modules is None or (norm is None and FINAL_STATE in self.layers):
            raise UnsupportedModelError(
                f"hidden states must come from a model with {num_layers} decoder layers and a norm "
                "after them, got "
                f"{self._name}, whose parts have other names; use a drafter that reads no hidden "
                "states"
            )
        self._modules: dict[int, nn.Module] = {
            layer: modules[layer - 1] for layer in self.layers if layer > 0
        }
        if norm is not None and FINAL_STATE in self.layers:
            self._modules[FINAL_STATE] = norm
        self._first: nn.Module | None = modules[0] if 0 in self.layers else None
        self._states: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._thread = 0

    def __enter__(self) -> "LayerCapture":
        self._thread = threading.get_ident()
        for layer, module in self._modules.items():
            self._handles.append(module.register_forward_hook(partial(self._keep_output, layer)))
        if self._first is not None:
            self._handles.append(
                self._first.register_forward_pre_hook(self._keep_input, with_kwargs=True)
            )
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._states = [], {}

    def state(self, layer: int) -> Tensor:
        """Return the states [B, Q, D] of one layer in the last forward."""
        if layer not in self._states:
            raise UnsupportedModelError(
                f"the target's forward must run its own layers, got none of layer {layer} in "
                f"{self._name}, as when "
                "forward() was compiled; use a drafter that reads no hidden states"
            )
        return self._states[layer]

    def concatenated(self) -> Tensor:
        """Return the states of all layers in the last forward, in the order of the ids.

        They are concatenated to [B, Q, A * D].
        """
        return concatenated([self.state(layer) for layer in self.layers])

    def _keep_output(self, layer: int, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._keep(layer, output[0] if isinstance(output, tuple) else output)

    def _keep_input(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self._thread:
            self._keep(0, args[0] if args else kwargs["hidden_states"])

    def _keep(self, layer: int, states: Tensor) -> None:
        if states.ndim != STATE_NDIM:
            raise UnsupportedModelError(
                "hidden states must be one vector for each token, got the shape "
                f"{list(states.shape)} at layer "
                f"{layer} of {self._name}; use a drafter that reads the state after the final norm "
                "alone, or none"
            )
        self._states[layer] = states.clone()  # a later layer may add to its input in place


def concatenated(states: Sequence[Tensor]) -> Tensor:
    """Concatenate A states [B, Q, D], possibly on several devices, to [B, Q, A * D]."""
    return (
        states[0]
        if len(states) == 1
        else torch.cat([state.to(states[0].device) for state in states], dim=-1)
    )


def _parts(decoder: nn.Module, names: Sequence[str]) -> list[Any]:
    return [module for name in names if (module := getattr(decoder, name, None)) is not None]
