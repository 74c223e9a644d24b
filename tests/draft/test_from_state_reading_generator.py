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
from hf_speculate.draft.from_candidate_generator import layers_read, make_generator
from hf_speculate.draft.heads.dflash import BlockDrafter
from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import assert_equal_ids
from tests.draft.heads.test_mtp import make_checkpoint
from tests.draft.heads.watching import watch_drafter, watch_generators
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


@pytest.fixture(scope="module", params=["one MTP layer", "two MTP layers", "DFlash"])
def case(request, tmp_path_factory):
    """A target, what makes its generator, and how transformers itself is asked for it."""
    if request.param == "DFlash":
        target = hf_speculate.enable(make_model("llama", vocab_size=6))  # few tokens, that some drafts are right
        draft = make_dflash(target)
        embeddings, head = target.get_input_embeddings(), target.get_output_embeddings()
        source = partial(DFlashTokenCandidateGenerator, draft, embeddings, head)
        theirs = {"assistant_model": draft, "speculation_type": "dflash"}
        return SimpleNamespace(target=target, source=source, theirs=theirs, vocab_size=6)
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


def test_padding_chunks_of_the_prompt_and_a_passed_cache(case, monkeypatch):
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
    cache = DynamicCache(config=case.target.config)
    case.target(inputs["input_ids"][:, :5], past_key_values=cache)
    assert_equal_ids(plain, case.target.generate(**inputs, **options, past_key_values=cache))
    assert cache.get_seq_length() == plain.shape[1] - 1


class Reader(CandidateGenerator):
    """Asks for the states of some layers."""

    requires_model_outputs = True

    def __init__(self, asked):
        self.model_kwargs_overrides = asked

    get_candidates = update_candidate_strategy = None


def test_what_a_generator_that_reads_states_may_not_ask_for():
    for asked in ({}, {"output_hidden_states": True}, {"output_hidden_states": [1], "return_shared_kv_states": True}):
        with pytest.raises(UnsupportedGenerationError, match="reads"):
            layers_read(Reader(asked))
    prepared = {"logits_processor": [], "generation_config": GenerationConfig()}
    with pytest.raises(UnsupportedGenerationError, match="must be what makes a generator that reads hidden states"):
        make_generator(Reader({"output_hidden_states": -1}), **prepared)  # it remembers the text of another call
    assert layers_read(make_generator(lambda: Reader({"output_hidden_states": -1}), **prepared)) == [-1]
    prepared["generation_config"].output_hidden_states = True
    with pytest.raises(UnsupportedGenerationError, match="output_hidden_states must be left out with Reader"):
        make_generator(lambda: Reader({"output_hidden_states": -1}), **prepared)


@pytest.mark.parametrize("window", [8, 64])
def test_a_dflash_head_drafts_what_transformers_own_class_does(window, tmp_path, monkeypatch):
    # few tokens, that some drafts are right
    target = hf_speculate.enable(make_model("llama", vocab_size=6, num_hidden_layers=3))
    draft = make_dflash(target)
    draft.config.sliding_window = window
    for layer in draft.layers:
        layer.self_attn.sliding_window = window
    draft.save_pretrained(tmp_path)
    theirs = watch_generators(monkeypatch, DFlashTokenCandidateGenerator)
    ours = watch_drafter(monkeypatch, BlockDrafter)
    inputs = ragged_prompts(1, seed=3, min_len=11, max_len=11, vocab_size=6)  # longer than the window
    options = {"max_new_tokens": NUM_NEW}
    text = GenerationMixin.generate(target, **inputs, **options, assistant_model=draft, speculation_type="dflash")
    head = load_drafter(tmp_path, target)
    assert head.hidden_layers == (1, 2)
    assert head.spec.max_draft_tokens == BLOCK_SIZE - 1
    assert head.network.windows == (window + 1, window + 1)
    stats = hf_speculate.SpeculationStats()
    options |= {"assistant_model": head, "num_assistant_tokens": BLOCK_SIZE - 1, "speculation_stats": stats}
    assert_equal_ids(text, target.generate(**inputs, **options))
    num = min(len(ours), len(theirs)) - BLOCK_SIZE  # at the end of the text it may ask for more than we do
    assert num > 3
    assert ours[:num] == [ids for _, ids in theirs[:num]]
    assert torch.tensor(ours[:num]).unique().numel() > 2
    assert stats.num_accepted > 0
