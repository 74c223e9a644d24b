"""Test transformers' candidate generators in our loop, and our drafter in its assisted loop."""

from functools import partial

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    EarlyExitCandidateGenerator,
    PromptLookupCandidateGenerator,
)

import hf_speculate
from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.errors import ShapeError
from hf_speculate.models.inferencer import Inferencer
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.options.candidates.from_candidate_generator import (
    CandidateGeneratorDrafter,
    samples_its_logits,
)
from hf_speculate.options.candidates.to_candidate_generator import DraftModelCandidateGenerator
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.types import DraftOut, Kept, SampleStrategy
from tests.cases import assert_decodes_as_plain, assert_equal_ids
from tests.support.grammars import Brackets, Grammar, RollbackGrammar
from tests.support.recurrent_cases import hooks_of
from tests.support.tiny import make_model, noisy_copy, ragged_prompts

NUM_NEW = 24


class Scripted(CandidateGenerator):
    """Generator that proposes from a script and records its inputs."""

    def __init__(self, *proposals: list[int]):
        self.proposals = list(proposals)
        self.shown: list[list[int]] = []
        self.told: list[tuple[int, int]] = []

    def get_candidates(self, input_ids, **kwargs):
        self.shown.append(input_ids[0].tolist())
        return torch.cat(
            [input_ids, torch.tensor([self.proposals.pop(0)], dtype=torch.int64)], dim=1
        ), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.told.append((len(scores[0]) - 1, num_matches))


def ask(
    drafter: CandidateGeneratorDrafter, text: list[int], kept: list[int] | None = None, num: int = 5
) -> DraftOut:
    accepted = kept and Kept(torch.tensor([kept]), torch.tensor([len(kept)], dtype=torch.int32))
    return drafter.draft(
        DraftRequest(torch.tensor([text]), None, num, SampleStrategy.GREEDY, kept=accepted)
    )


def test_generator_gets_the_inputs_and_matches_of_transformers():
    generator = Scripted([7, 8, 9], [1, 2], [3])
    drafter = CandidateGeneratorDrafter(generator)
    # The token after the prompt equals the first candidate for the prompt.
    assert ask(drafter, [5, 6, 7]).token_ids.tolist() == [[8, 9]]
    assert ask(drafter, [0], kept=[8, 4]).token_ids.tolist() == [[1, 2]]
    assert ask(drafter, [0], kept=[0]).token_ids.tolist() == [[3]]
    assert generator.shown == [[5, 6], [5, 6, 7, 8, 4], [5, 6, 7, 8, 4, 0]]
    assert generator.told == [(3, 2), (2, 0)]
    generator = Scripted([9, 9], [1])
    # Token 7 was not a candidate.
    assert ask(CandidateGeneratorDrafter(generator), [5, 6, 7]).token_ids.tolist() == [[1]]
    assert (generator.shown, generator.told) == ([[5, 6], [5, 6, 7]], [(2, 0)])
    drafter = CandidateGeneratorDrafter(Scripted([], [], [1, 2, 3, 4]))
    assert ask(drafter, [5, 6, 7]).token_ids.shape == (1, 0)
    assert ask(drafter, [0], kept=[8], num=3).token_ids.tolist() == [[1, 2, 3]]


def test_fault_f_logits_of_an_unknown_generator_are_ignored():
    class Reports(Scripted):
        def get_candidates(self, input_ids, **kwargs):
            ids, _ = super().get_candidates(input_ids)
            return ids, torch.zeros(1, ids.shape[1] - input_ids.shape[1], 64)

    draft = ask(CandidateGeneratorDrafter(Reports([4])), [5])
    assert draft.token_ids.tolist() == [[4]]
    assert draft.token_logits is None


def test_sampled_proposal_comes_with_its_distribution():
    draft = make_model("llama")
    drafter = ModelDrafter(Inferencer(LanguageModel(draft)))
    generator = DraftModelCandidateGenerator(drafter, 2, SampleStrategy.RANDOM, 9)
    drafted = ask(CandidateGeneratorDrafter(generator), [5], num=2)
    expected = draft(torch.cat([torch.tensor([[5]]), drafted.token_ids], dim=1)).logits[:, :2]
    torch.testing.assert_close(drafted.token_logits, expected)
    torch.testing.assert_close(drafted.logsumexp, expected.float().logsumexp(-1))


def test_unknown_generators_do_not_count_as_samplers():
    def assisted(family, do_sample):
        config = GenerationConfig(do_sample=do_sample, max_length=9, assistant_early_exit=1)
        return family(torch.tensor([[1]]), make_model("llama"), config, {})

    assert samples_its_logits(assisted(EarlyExitCandidateGenerator, True))
    assert not samples_its_logits(assisted(AssistedCandidateGenerator, False))
    assert not samples_its_logits(assisted(type("Other", (AssistedCandidateGenerator,), {}), True))
    assert not samples_its_logits(PromptLookupCandidateGenerator())


def early_exit(generation_config, **prepared):
    generation_config.assistant_early_exit = 3
    return EarlyExitCandidateGenerator(
        assistant_model=make_model("llama", num_hidden_layers=4),
        generation_config=generation_config,
        **prepared,
    )


SOURCES = {
    "assisted": lambda target: partial(
        AssistedCandidateGenerator, assistant_model=noisy_copy(target, 0.05)
    ),
    "early exit": lambda target: early_exit,
}


@pytest.fixture(scope="module")
def target():
    return hf_speculate.enable(make_model("llama", num_hidden_layers=4))


@pytest.mark.parametrize("source", SOURCES)
def test_greedy_text_equals_plain(target, source):
    options = {"candidate_generator": SOURCES[source](target), "num_assistant_tokens": None}
    stats = assert_decodes_as_plain(
        target, None, ragged_prompts(1, seed=3), max_new_tokens=NUM_NEW, **options
    )
    assert stats.num_accepted > 0
    assert stats.num_emitted == NUM_NEW - 1


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("make", [Grammar, RollbackGrammar])
def test_stateful_processors_do_not_see_generator_trials(target, make):
    inputs, options = (
        ragged_prompts(1, seed=3, min_len=12, vocab_size=8),
        {"max_new_tokens": NUM_NEW},
    )
    draft_options = {
        "candidate_generator": SOURCES["assisted"](target),
        "logits_processor": [make(Brackets())],
    }
    plain = target.generate(**inputs, **options, logits_processor=[Grammar(Brackets())])
    assert_equal_ids(plain, target.generate(**inputs, **options, **draft_options))


def test_draft_model_config_is_unchanged(target):
    draft = noisy_copy(target, 0.05)
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    before = draft.generation_config.to_dict()
    source = partial(AssistedCandidateGenerator, assistant_model=draft)
    target.generate(**ragged_prompts(1, seed=3), max_new_tokens=NUM_NEW, candidate_generator=source)
    assert draft.generation_config.to_dict() == before


def test_generator_writing_to_its_config_changes_no_text():
    target = make_model("llama")
    options = {**ragged_prompts(1, seed=3), "max_new_tokens": NUM_NEW}
    plain = target.generate(**options)

    def source(generation_config, **others):
        generation_config.max_length = 3
        return PromptLookupCandidateGenerator(
            num_output_tokens=3, max_matching_ngram_size=2, max_length=100
        )

    assert_equal_ids(hf_speculate.generate(target, **options, candidate_generator=source), plain)


def test_transformers_greedy_loop_gives_the_plain_text():
    plain, generators = make_model("llama"), []

    class Target(LlamaForCausalLM):
        def _get_candidate_generator(
            self, generation_config, input_ids, assistant_model, logits_processor, **kwargs
        ):
            processors = BlockLogitsProcessorList(logits_processor).row_wise_part()
            drafter = ModelDrafter(Inferencer(LanguageModel(assistant_model)), processors)
            options = drafter, 3, SampleStrategy.GREEDY, generation_config.max_length
            generators.append(DraftModelCandidateGenerator(*options, device="cpu"))
            return generators[-1]

    target = noisy_copy(plain, 0.0)
    target.__class__ = Target
    inputs, options = ragged_prompts(1, seed=2), {"max_new_tokens": 20, "repetition_penalty": 1.3}
    draft = noisy_copy(plain, 0.05, seed=1)
    assert_equal_ids(
        plain.generate(**inputs, **options),
        target.generate(**inputs, **options, assistant_model=draft),
    )
    assert 0 < generators[0]._num_rounds < 20


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "mamba", "lfm2"])
def test_draft_cache_follows_a_rejected_draft(family):
    draft, text = make_model(family), ragged_prompts(1, seed=2)["input_ids"]
    drafter = ModelDrafter(Inferencer(LanguageModel(draft)))
    generator = DraftModelCandidateGenerator(
        drafter, 4, SampleStrategy.GREEDY, max_length=text.shape[1] + 14
    )
    # The last requests reach the maximum length.
    for num_accepted, num in ((0, 4), (4, 4), (1, 4), (3, 4), (0, 2), (0, 1), (0, 0)):
        with torch.no_grad():
            candidates, _ = generator.get_candidates(text)
        if num:
            plain = draft.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=num)
        assert_equal_ids(plain if num else text, candidates)
        assert not hooks_of(draft)
        accepted_ids = candidates[:, : text.shape[1] + num_accepted + 1]
        text = (
            accepted_ids
            if num_accepted == 4
            else torch.cat([accepted_ids[:, :-1], (accepted_ids[:, -1:] + 1) % 64], dim=1)
        )
    with pytest.raises(ShapeError, match=r"input_ids must be \[1, T\]"):
        generator.get_candidates(text.expand(2, -1))
