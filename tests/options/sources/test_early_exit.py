"""Test early exit, where the first layers of the target draft and share its weights."""

import copy

import pytest
import torch

import hf_speculate
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.options.sources.early_exit import early_exit_model
from tests.cases import assert_equal_ids
from tests.support.tiny import make_model, ragged_prompts


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_early_exit_equals_the_model_with_fewer_layers(family):
    model = make_model(family, num_hidden_layers=4)
    config = copy.deepcopy(model.config.to_dict())
    small = make_model(family, num_hidden_layers=2, seed=5)
    small.load_state_dict(
        {name: weight for name, weight in model.state_dict().items() if name in small.state_dict()}
    )
    ids = ragged_prompts(1, seed=1)["input_ids"]
    before, draft = model(ids).logits, early_exit_model(model, 2)
    assert torch.equal(draft(ids).logits, small(ids).logits)
    assert torch.equal(model(ids).logits, before)
    assert model.config.to_dict() == config
    assert draft.model.layers[0] is model.model.layers[0]  # no second copy of the weights
    assert draft.lm_head is model.lm_head


def test_model_with_shared_states_is_refused():
    with pytest.raises(
        UnsupportedModelError, match="got Gemma3nForCausalLM: its layers share states"
    ):
        early_exit_model(make_model("gemma3n"), 2)


def test_generation_config_may_set_early_exit():
    target = hf_speculate.enable(make_model("llama", num_hidden_layers=4))
    inputs = ragged_prompts(2, seed=4)
    plain = target.generate(**inputs, max_new_tokens=10)
    target.generation_config.assistant_early_exit = 2
    stats = hf_speculate.SpeculationStats()
    ours = target.generate(
        **inputs, max_new_tokens=10, speculation_stats=stats, num_assistant_tokens=2
    )
    assert_equal_ids(plain, ours)
    assert stats.num_drafted > 0
    assert target.generation_config.assistant_early_exit == 2
