"""transformers' candidate generators that read the target's hidden states, MTP and DFlash, in our loop."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)
from transformers.generation.candidate_generator import (
    CandidateGenerator,
    DFlashTokenCandidateGenerator,
    MTPCandidateGenerator,
)

import hf_speculate
from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.from_candidate_generator import (
    StateReadingGeneratorDrafter,
    layers_read,
    make_generator,
    samples_its_logits,
)
from hf_speculate.errors import ShapeError, UnsupportedGenerationError
from hf_speculate.types import Kept, SampleStrategy
from tests.cases import assert_equal_ids
from tests.draft.heads.test_mtp import make_checkpoint
from tests.draft.heads.watching import watch_generators
from tests.tiny import INITIALIZER_RANGE, make_model, ragged_prompts

NUM_NEW = 24
BLOCK_SIZE = 4  # of DFlash: the token that is known, and three drafted ones


def make_dflash(target):
    """A DFlash draft of random weights for the target."""
    config = target.config
    options = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_window": 8,
        "initializer_range": INITIALIZER_RANGE,
        "block_size": BLOCK_SIZE,
        "mask_token_id": config.vocab_size - 1,
        "target_layer_ids": [0, 1],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        draft = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**options)).eval()
    return draft.to(target.dtype).requires_grad_(False)


def dflash_of(target, draft):
    embeddings, head = target.get_input_embeddings(), target.get_output_embeddings()
    return partial(DFlashTokenCandidateGenerator, draft, embeddings, head)


@pytest.fixture(scope="module", params=["one MTP layer", "two MTP layers", "DFlash"])
def case(request, tmp_path_factory):
    """A target, what makes its generator, and how transformers itself is asked for it."""
    if request.param == "DFlash":
        target = hf_speculate.enable(make_model("llama", vocab_size=6))  # few tokens, that some drafts are right
        draft = make_dflash(target)
        theirs = {"assistant_model": draft, "speculation_type": "dflash"}
        return SimpleNamespace(target=target, source=dflash_of(target, draft), theirs=theirs, vocab_size=6)
    target = make_checkpoint(tmp_path_factory.mktemp("mtp"), "deepseek_v3", 1 if "one" in request.param else 2)
    source = partial(MTPCandidateGenerator, target)
    return SimpleNamespace(target=target, source=source, theirs={"use_mtp": True}, vocab_size=64)


def prompt_of(case, length: int = 9):
    return ragged_prompts(1, seed=3, min_len=length, max_len=length, vocab_size=case.vocab_size)


def test_the_generator_proposes_what_it_does_in_transformers_own_loop(case, monkeypatch):
    inputs, made = prompt_of(case), watch_generators(monkeypatch, MTPCandidateGenerator, DFlashTokenCandidateGenerator)
    theirs = GenerationMixin.generate(case.target, **inputs, max_new_tokens=NUM_NEW, **case.theirs)
    in_theirs, made[:] = list(made), []
    stats = hf_speculate.SpeculationStats()
    options = {"candidate_generator": case.source, "speculation_stats": stats}
    assert_equal_ids(theirs, case.target.generate(**inputs, max_new_tokens=NUM_NEW, **options))
    assert 0 < stats.num_accepted < stats.num_verified
    num = len(made) - 1  # at the end of the text transformers may ask once more, or for fewer
    assert num > 4
    assert made[:num] == in_theirs[:num]


def test_a_proposal_that_is_cut_off_leaves_the_text_as_it_is(case):
    inputs, num = prompt_of(case), 1
    plain = case.target.generate(**inputs, max_new_tokens=NUM_NEW)
    stats = hf_speculate.SpeculationStats()
    options = {"candidate_generator": case.source, "num_assistant_tokens": num, "speculation_stats": stats}
    assert_equal_ids(plain, case.target.generate(**inputs, max_new_tokens=NUM_NEW, **options))
    assert max(stats.rounds_by_draft_len) <= num
    assert stats.num_accepted > 0


def test_a_padded_row_and_a_prompt_in_chunks(case, monkeypatch):
    inputs, made = prompt_of(case), watch_generators(monkeypatch, MTPCandidateGenerator, DFlashTokenCandidateGenerator)
    options = {"max_new_tokens": NUM_NEW, "candidate_generator": case.source}
    plain = case.target.generate(**inputs, **options)
    expected, made[:] = list(made), []
    padded = {name: torch.nn.functional.pad(one, (3, 0)) for name, one in inputs.items()}
    assert_equal_ids(plain, case.target.generate(**padded, **options)[:, 3:])
    assert made == expected  # and is shown no padding
    made.clear()
    assert_equal_ids(plain, case.target.generate(**inputs, **options, prefill_chunk_size=4))
    assert made == expected


def test_a_passed_cache_and_an_end_of_text(case):
    inputs = prompt_of(case)
    text = case.target.generate(**inputs, max_new_tokens=NUM_NEW)
    end = int(text[0, inputs["input_ids"].shape[1] + 7])
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": end}
    plain = case.target.generate(**inputs, **options)
    cache = DynamicCache(config=case.target.config)
    case.target(inputs["input_ids"][:, :5], past_key_values=cache)
    ours = case.target.generate(**inputs, **options, past_key_values=cache, candidate_generator=case.source)
    assert_equal_ids(plain, ours)
    assert cache.get_seq_length() == ours.shape[1] - 1


def test_drawn_proposals_come_with_their_distribution(case):
    made = []

    def source(**prepared):
        made.append(make_generator(case.source, **prepared))
        return made[-1]

    case.target.generate(**prompt_of(case), do_sample=True, seed=1, max_new_tokens=4, candidate_generator=source)
    assert [samples_its_logits(generator) for generator in made] == [True]


class Reader(CandidateGenerator):
    """Proposes nothing much, and writes down what it is told."""

    requires_model_outputs = True

    def __init__(self, asked):
        self.model_kwargs_overrides = asked
        self.told = []

    def get_candidates(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches):
        states = model_outputs.hidden_states
        self.told.append((input_ids.tolist(), [states[layer].tolist() for layer in (2, 0)], n_last_matches))
        assert model_kwargs["position_ids"].shape == model_kwargs["attention_mask"].shape == input_ids.shape
        assert not is_first_iteration
        return torch.cat([input_ids, torch.tensor([[7, 8]])], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        pass  # older versions of transformers ask for one


def kept(ids, states):
    num = torch.tensor([len(ids)], dtype=torch.int32)
    return Kept(torch.tensor([ids]), num, torch.tensor([states], dtype=torch.float32))


def test_what_a_generator_is_told_of_each_round():
    generator = Reader({"output_hidden_states": [2, 0]})
    drafter = StateReadingGeneratorDrafter(generator, layers_read(generator))
    text, greedy = torch.tensor([[0, 0, 4, 5, 6]]), SampleStrategy.GREEDY  # padded
    first = drafter.draft(DraftRequest(text, None, 5, greedy, kept=kept([5, 6], [[0.1, 1.0], [0.2, 2.0]])))
    assert first.token_ids.tolist() == [[7, 8]]
    drafter.draft(DraftRequest(text, None, 5, greedy, kept=kept([7, 9], [[0.3, 3.0], [0.4, 4.0]])))
    (shown, states, num), (later, more, num_later) = generator.told
    assert (shown, num) == ([[4, 5, 6]], 0)
    assert (later, num_later) == ([[4, 5, 6, 7, 9]], 1)
    assert torch.tensor(states).flatten().tolist() == pytest.approx([0.1, 0.2, 1.0, 2.0])
    assert torch.tensor(more).flatten().tolist() == pytest.approx([0.3, 0.4, 3.0, 4.0])
    with pytest.raises(ShapeError, match="kept must hold hidden states"):
        drafter.draft(DraftRequest(text, None, 5, greedy))
    with pytest.raises(ShapeError, match=r"must be \[1, Q\] for candidates"):
        drafter.draft(DraftRequest(text.expand(2, -1), None, 5, greedy))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "reads the hidden states of all layers"),
        ({"output_hidden_states": True}, "reads the hidden states of all layers"),
        ({"output_hidden_states": [1], "return_shared_kv_states": True}, "Reader, which reads return_shared_kv_states"),
    ],
)
def test_a_generator_that_reads_more_is_refused(asked, named):
    with pytest.raises(UnsupportedGenerationError, match=named):
        layers_read(Reader(asked))


def test_a_generator_that_remembers_a_text_is_made_in_the_call():
    prepared = {"logits_processor": [], "generation_config": GenerationConfig()}
    with pytest.raises(UnsupportedGenerationError, match="must be what makes a generator that reads hidden states"):
        make_generator(Reader({"output_hidden_states": -1}), **prepared)
    assert layers_read(make_generator(lambda: Reader({"output_hidden_states": -1}), **prepared)) == [-1]
    prepared["generation_config"].output_hidden_states = True
    with pytest.raises(UnsupportedGenerationError, match="output_hidden_states must be left out with Reader"):
        make_generator(lambda: Reader({"output_hidden_states": -1}), **prepared)
