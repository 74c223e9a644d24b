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


def test_windows_are_those_of_the_layers_types():
    types = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
    assert read_layer_config({**FIELDS, **types, "num_hidden_layers": 2}).windows == (7, None)
    config = read_layer_config({**FIELDS, "sliding_window": 7})
    assert (config.windows, config.num_layers, config.num_kv_heads, config.head_dim) == ((None,), 1, 4, 8)


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
