"""Provide helpers for tests of hybrid and recurrent models."""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_speculate.cache.layers import attention_layers
from hf_speculate.options.recurrent.states import States, states_of
from tests.support import tiny

# Float64 has a round-off of 1e-16. Float32 states, or experts weighted in float32, have 6e-8, and a
# value near the midpoint of two float32 numbers may round either way. Wrong states differ by 1e-2
# or more.
TOLERANCE, FLOAT32_TOLERANCE = 1e-12, 1e-6


def hooks_of(model: PreTrainedModel) -> list[object]:
    """Return all hooks except those installed by `tests.support.tiny`."""
    tables = [
        table
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks)
    ]
    return [hook for table in tables for hook in table.values() if hook is not tiny._clamp_mask]


def recurrent_states(kv_cache: Cache) -> list[States]:
    """Return copies of the recurrent states, by layer."""
    layers = [layer for layer in kv_cache.layers if hasattr(layer, "conv_states")]
    return [{slot: state.clone() for slot, state in states_of(layer).items()} for layer in layers]


def error(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max())


def assert_equal_caches(one: Cache, other: Cache, most: float = FLOAT32_TOLERANCE) -> None:
    """Compare the recurrent, attention and other states of two caches."""
    for layer, expected in zip(one.layers, other.layers, strict=True):
        if hasattr(layer, "conv_states"):
            assert not layer.record_past
            assert layer.has_previous_state == expected.has_previous_state
    for states, others in zip(recurrent_states(one), recurrent_states(other), strict=True):
        assert states.keys() == others.keys()
        for slot, state in states.items():
            assert (state.shape, state.dtype) == (others[slot].shape, others[slot].dtype)
            assert error(state, others[slot]) <= most
    for layer, expected in zip(
        *(attention_layers(kv_cache.layers) for kv_cache in (one, other)), strict=True
    ):
        assert layer.get_seq_length() == expected.get_seq_length()
        assert torch.allclose(layer.keys, expected.keys, atol=most)
        assert torch.allclose(layer.values, expected.values, atol=most)
