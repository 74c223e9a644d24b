"""Our drafter inside transformers' own assisted loop."""

from functools import partial

import pytest
import torch
from transformers import LlamaForCausalLM, RwkvForCausalLM
from transformers.generation import AssistedCandidateGenerator

import hf_speculate
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.to_candidate_generator import DraftModelCandidateGenerator
from hf_speculate.errors import ShapeError, UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.models.inferencer import Inferencer
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.types import SampleStrategy
from tests.cases import assert_equal_ids
from tests.recurrent_cases import hooks_of
from tests.tiny import make_model, noisy_copy, ragged_prompts
from tests.tiny_recurrent import unsupported_config


class WithOurCandidates(LlamaForCausalLM):
    """A target whose assisted loop drafts with our drafter."""

    made: list = []  # noqa: RUF012  # every generator of a test, so that it can be looked at

    def _get_candidate_generator(self, generation_config, input_ids, assistant_model, logits_processor, **kwargs):
        processors = BlockLogitsProcessorList(logits_processor).row_wise_part()
        drafter = ModelDrafter(Inferencer(LanguageModel(assistant_model)), processors)
        generator = DraftModelCandidateGenerator(
            drafter, 3, SampleStrategy.GREEDY, generation_config.max_length, device=assistant_model.device
        )
        type(self).made.append(generator)
        return generator


def as_test_target(model):
    target = WithOurCandidates(model.config).to(model.dtype).eval()
    target.load_state_dict(model.state_dict())
    target.generation_config = model.generation_config
    WithOurCandidates.made.clear()
    return target


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_transformers_greedy_loop_gives_the_plain_text(options):
    plain = make_model("llama")
    target = as_test_target(plain)
    draft = noisy_copy(plain, 0.05, seed=1)
    inputs = ragged_prompts(1, seed=2)
    expected = plain.generate(**inputs, max_new_tokens=20, **options)
    got = target.generate(**inputs, max_new_tokens=20, assistant_model=draft, **options)
    assert_equal_ids(expected, got)
    (generator,) = WithOurCandidates.made
    assert 0 < generator._num_rounds < 20


def test_the_prefix_leads_and_the_cache_follows_a_text_that_went_another_way():
    draft = make_model("llama")
    generator = generator_of(draft)
    text = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        first, logits = generator.get_candidates(text)
        assert logits is None
        assert torch.equal(first[:, :3], text)
        other = torch.cat([first[:, :5], (first[:, 5:6] + 1) % 64], dim=1)
        second, _ = generator.get_candidates(other)
    expected = draft.generate(other, max_new_tokens=4)
    assert torch.equal(second, expected)


def generator_of(draft, max_length=64):
    drafter = ModelDrafter(Inferencer(LanguageModel(draft)))
    return DraftModelCandidateGenerator(drafter, 4, SampleStrategy.GREEDY, max_length=max_length)


def test_no_token_is_drafted_past_the_end_and_more_than_one_row_is_refused():
    generator = generator_of(make_model("llama"), max_length=5)
    with torch.no_grad():
        assert generator.get_candidates(torch.tensor([[3, 4]]))[0].shape == (1, 4)
        assert generator.get_candidates(torch.tensor([[3, 4, 5, 6]]))[0].shape == (1, 4)
    with pytest.raises(ShapeError, match=r"input_ids must be \[1, T\]"):
        generator.get_candidates(torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["qwen3_5", "mamba", "lfm2"])
def test_recurrent_drafts_draft_their_own_text(kind):
    draft = make_model(kind)
    generator = generator_of(draft)
    text = ragged_prompts(1, seed=2)["input_ids"]
    for num_accepted in (0, 4, 1, 3):
        with torch.no_grad():
            candidates, _ = generator.get_candidates(text)
        assert_equal_ids(draft.generate(text, max_new_tokens=4), candidates)
        assert not hooks_of(draft)
        kept = candidates[:, : text.shape[1] + num_accepted + 1]
        text = kept if num_accepted == 4 else torch.cat([kept[:, :-1], (kept[:, -1:] + 1) % 64], dim=1)


def test_a_draft_with_states_outside_its_cache_is_refused():
    draft = RwkvForCausalLM(unsupported_config("rwkv"))
    with pytest.raises(UnsupportedModelError, match="got RwkvForCausalLM with recurrent state outside a transformers"):
        generator_of(draft)


def test_transformers_generator_refuses_a_draft_without_attention_layers():
    target, draft = hf_speculate.enable(make_model("llama")), make_model("mamba2")
    generator = partial(AssistedCandidateGenerator, assistant_model=draft)
    with pytest.raises(UnsupportedGenerationError, match="with a model that has attention layers, got Assisted"):
        target.generate(**ragged_prompts(1, seed=1), candidate_generator=generator)
