"""The layers that configs describe: what missing fields mean, and rotary embeddings in every spelling."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_speculate.draft.heads.layer_config import read_layer_config
from hf_speculate.draft.heads.layers import Rotary

FIELDS = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_missing_fields_mean_what_they_mean_to_trainers():
    config = read_layer_config(FIELDS)
    assert (config.num_layers, config.num_kv_heads, config.head_dim, config.rotary_dim) == (1, 4, 8, 8)
    assert (config.hidden_act, config.windows, config.rope) == ("silu", (None,), {"rope_theta": 10000.0})


def test_windows_are_those_of_the_layers_types():
    types = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
    assert read_layer_config({**FIELDS, **types, "num_hidden_layers": 2}).windows == (7, None)
    assert read_layer_config({**FIELDS, "sliding_window": 7}).windows == (None,)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 500.0, "rope_scaling": LLAMA3}, {**LLAMA3, "rope_theta": 500.0}),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}, {**LLAMA3, "rope_theta": 500.0}),
        ({"rope_theta": 500.0, "rope_parameters": LLAMA3}, {**LLAMA3, "rope_theta": 500.0}),
        ({"rope_theta": 500.0, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 500.0}),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 9.0}}},
            {"rope_type": "default", "rope_theta": 500.0},
        ),
    ],
    ids=["scaling", "parameters", "parameters without theta", "theta", "parameters by layer"],
)
def test_rotary_embeddings_are_those_of_transformers(fields, rope):
    config = read_layer_config({**FIELDS, "max_position_embeddings": 512, **fields})
    positions = torch.arange(200)[None]
    expected = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope)
    )(torch.empty(0), positions)
    found = Rotary(config, torch.device("cpu"))(positions, torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, 0], theirs, rtol=0, atol=0)


@pytest.mark.parametrize("place", ["top", "parameters"])
def test_a_share_of_each_head_may_be_rotated(place):
    rope = {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}
    config = read_layer_config({**FIELDS, **(rope if place != "top" else {"partial_rotary_factor": 0.5})})
    assert (config.head_dim, config.rotary_dim) == (8, 4)
    rotation = Rotary(config, torch.device("cpu"))(torch.tensor([[3]]), torch.float32)
    states = torch.randn(1, 1, 1, 8)
    turned = rotation.turn(states)
    assert torch.equal(turned[..., 4:], states[..., 4:])
    assert not torch.equal(turned[..., :4], states[..., :4])


def test_frequencies_stay_in_float32():
    rotary = Rotary(read_layer_config(FIELDS), torch.device("cpu"))
    exact, rounded = (rotary(torch.tensor([[3001]]), dtype).cos for dtype in (torch.float64, torch.bfloat16))
    torch.testing.assert_close(rounded.double(), exact, rtol=0, atol=2**-8)
