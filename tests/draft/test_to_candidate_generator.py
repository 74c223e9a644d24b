"""Our drafter inside transformers' own assisted loop."""

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.to_candidate_generator import DraftModelCandidateGenerator
from hf_speculate.errors import ShapeError
from hf_speculate.models.inferencer import Inferencer
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.types import SampleStrategy
from tests.cases import assert_equal_ids
from tests.recurrent_cases import hooks_of
from tests.tiny import make_model, noisy_copy, ragged_prompts


def test_transformers_greedy_loop_gives_the_plain_text():
    plain, made = make_model("llama"), []

    class Target(LlamaForCausalLM):
        def _get_candidate_generator(self, generation_config, input_ids, assistant_model, logits_processor, **kwargs):
            processors = BlockLogitsProcessorList(logits_processor).row_wise_part()
            drafter = ModelDrafter(Inferencer(LanguageModel(assistant_model)), processors)
            options = drafter, 3, SampleStrategy.GREEDY, generation_config.max_length
            made.append(DraftModelCandidateGenerator(*options, device="cpu"))
            return made[-1]

    target = noisy_copy(plain, 0.0)
    target.__class__ = Target
    inputs, options = ragged_prompts(1, seed=2), {"max_new_tokens": 20, "repetition_penalty": 1.3}
    draft = noisy_copy(plain, 0.05, seed=1)
    assert_equal_ids(plain.generate(**inputs, **options), target.generate(**inputs, **options, assistant_model=draft))
    assert 0 < made[0]._num_rounds < 20


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "mamba", "lfm2"])
def test_the_cache_follows_a_text_that_went_another_way(kind):
    draft, text = make_model(kind), ragged_prompts(1, seed=2)["input_ids"]
    drafter = ModelDrafter(Inferencer(LanguageModel(draft)))
    generator = DraftModelCandidateGenerator(drafter, 4, SampleStrategy.GREEDY, max_length=text.shape[1] + 14)
    for num_accepted, num in ((0, 4), (4, 4), (1, 4), (3, 4), (0, 2), (0, 1), (0, 0)):  # at last to the end
        with torch.no_grad():
            candidates, _ = generator.get_candidates(text)
        if num:
            plain = draft.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=num)
        assert_equal_ids(plain if num else text, candidates)
        assert not hooks_of(draft)
        kept = candidates[:, : text.shape[1] + num_accepted + 1]
        text = kept if num_accepted == 4 else torch.cat([kept[:, :-1], (kept[:, -1:] + 1) % 64], dim=1)
    with pytest.raises(ShapeError, match=r"input_ids must be \[1, T\]"):
        generator.get_candidates(text.expand(2, -1))
