"""Compare MTP and DFlash heads, and transformers' generators in our loop, with transformers."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
)
from transformers.generation.candidate_generator import (
    CandidateGenerator,
    DFlashTokenCandidateGenerator,
    MTPCandidateGenerator,
)

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import UnsupportedGenerationError
from hf_speculate.options.candidates.from_candidate_generator import layers_read, make_generator
from hf_speculate.options.heads.head import DraftHead
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.verify.greedy import GreedyVerifier
from tests.cases import assert_equal_ids
from tests.options.heads.test_mtp import make_checkpoint
from tests.support.tiny import make_model, ragged_prompts

NUM_NEW = 24
BLOCK_SIZE = 4  # DFlash: the known token and three drafted ones


def make_dflash(target, window):
    """Make a DFlash draft with random weights for the target."""
    same = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    options = {
        **{name: getattr(target.config, name) for name in (*same, "initializer_range")},
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_window": window,
        "block_size": BLOCK_SIZE,
        "mask_token_id": target.config.vocab_size - 1,
        "target_layer_ids": [0, 1],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        draft = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**options)).eval()
    return draft.to(target.dtype).requires_grad_(False)


class Case(NamedTuple):
    """Target, head, generator and transformers' options."""

    target: PreTrainedModel
    head: DraftHead
    source: Callable[..., CandidateGenerator]
    theirs: dict[str, Any]
    num_drafted: int
    watched: type  # class of the generator in transformers


def mtp_case(folder, family, num_layers, seed=None):
    target = make_checkpoint(folder, family, num_layers, seed)
    source, watched = partial(MTPCandidateGenerator, target), MTPCandidateGenerator
    return Case(
        target, load_drafter(folder, target), source, {"use_mtp": True}, num_layers, watched
    )


def dflash_case(folder, window):
    # A small vocabulary makes some drafts correct.
    target = hf_speculate.enable(make_model("llama", vocab_size=6, num_hidden_layers=3))
    draft = make_dflash(target, window)
    draft.save_pretrained(folder)
    tables = target.get_input_embeddings(), target.get_output_embeddings()
    source = partial(DFlashTokenCandidateGenerator, draft, *tables)
    theirs = {"assistant_model": draft, "speculation_type": "dflash"}
    return Case(
        target,
        load_drafter(folder, target),
        source,
        theirs,
        BLOCK_SIZE - 1,
        DFlashTokenCandidateGenerator,
    )


CASES = {
    "one MTP layer": (mtp_case, "deepseek_v3", 1),
    "two MTP layers": (mtp_case, "deepseek_v3", 2),
    "three random MTP layers": (mtp_case, "deepseek_v3", 3, 5),
    "GLM 4": (mtp_case, "glm4_moe", 2, 5),
    "DFlash with windows": (dflash_case, 8),
    "DFlash": (dflash_case, 64),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    make, *arguments = CASES[request.param]
    return make(tmp_path_factory.mktemp("head"), *arguments)


def prompt_of(case):
    """Return a prompt that is longer than the window."""
    return ragged_prompts(
        1, seed=3, min_len=11, max_len=11, vocab_size=case.target.config.vocab_size
    )


def watch_generator(patch, case):
    """Record the ids of every later proposal from the case's generator."""
    generators, original = [], case.watched.get_candidates

    def watched(self, input_ids, *args, **kwargs):
        candidates = original(self, input_ids, *args, **kwargs)
        generators.append(candidates[0][0, input_ids.shape[1] :].tolist())
        return candidates

    patch.setattr(case.watched, "get_candidates", watched)
    return generators


class WatchingVerifier:
    """Greedy verifier that records nonempty drafts."""

    def __init__(self):
        self.drafted = []

    def verify(self, target_logits, draft, keys):
        if draft.token_ids.numel():
            self.drafted.append(draft.token_ids[0].tolist())
        return GreedyVerifier().verify(target_logits, draft, keys)


def test_generator_and_head_draft_as_transformers(case, monkeypatch, registry):
    inputs, generators = prompt_of(case), watch_generator(monkeypatch, case)
    text = GenerationMixin.generate(case.target, **inputs, max_new_tokens=NUM_NEW, **case.theirs)
    theirs, generators[:] = [ids for ids in generators if ids], []
    watching = WatchingVerifier()
    hf_speculate.register_verifier("watching", lambda config: watching, lossless=True)
    for draft_options in (
        {"candidate_generator": case.source},
        {"assistant_model": case.head, "verifier": "watching"},
    ):
        options = {
            **draft_options,
            "num_assistant_tokens": case.num_drafted,
            "max_new_tokens": NUM_NEW,
        }
        assert_equal_ids(text, case.target.generate(**inputs, **options))
    for ours in (generators, watching.drafted):
        # at the end, transformers may request more tokens
        num = min(len(ours), len(theirs)) - case.num_drafted
        assert num > 3
        assert ours[:num] == theirs[:num]
        assert torch.tensor(ours[:num]).unique().numel() > 2


def test_heads_draft_with_padding_chunks_and_a_passed_cache(case, monkeypatch):
    inputs, generators = prompt_of(case), watch_generator(monkeypatch, case)
    options = {"max_new_tokens": NUM_NEW, "candidate_generator": case.source}
    plain = case.target.generate(**inputs, **options)
    expected, generators[:] = list(generators), []
    padded = {name: torch.nn.functional.pad(tensor, (3, 0)) for name, tensor in inputs.items()}
    assert_equal_ids(plain, case.target.generate(**padded, **options)[:, 3:])
    assert generators == expected  # the same as without padding
    generators.clear()
    assert_equal_ids(plain, case.target.generate(**inputs, **options, prefill_chunk_size=4))
    assert generators == expected
    cache = DynamicCache(config=case.target.config)
    case.target(inputs["input_ids"][:, :5], **{CACHE_NAME: cache})
    assert_equal_ids(plain, case.target.generate(**inputs, **options, **{CACHE_NAME: cache}))
    assert cache.get_seq_length() == plain.shape[1] - 1


class Reader(CandidateGenerator):
    """Generator that requests hidden states."""

    requires_model_outputs = True

    def __init__(self, asked):
        self.model_kwargs_overrides = asked

    get_candidates = update_candidate_strategy = None


def test_state_reading_generator_is_refused_unsupported_requests():
    for asked in (
        {},
        {"output_hidden_states": True},
        {"output_hidden_states": [1], "return_shared_kv_states": True},
    ):
        with pytest.raises(UnsupportedGenerationError, match="reads"):
            layers_read(Reader(asked))
    prepared = {"logits_processor": [], "generation_config": GenerationConfig()}
    with pytest.raises(
        UnsupportedGenerationError, match="must be what makes a generator that reads hidden states"
    ):
        # the generator's state belongs to another call
        make_generator(Reader({"output_hidden_states": -1}), **prepared)
    assert layers_read(
        make_generator(lambda: Reader({"output_hidden_states": -1}), **prepared)
    ) == [-1]
    prepared["generation_config"].output_hidden_states = True
    with pytest.raises(
        UnsupportedGenerationError, match="output_hidden_states must be left out with Reader"
    ):
        make_generator(lambda: Reader({"output_hidden_states": -1}), **prepared)
