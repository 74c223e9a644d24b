"""Drafts whose vocabulary is not the target's."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from transformers import AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_speculate
from hf_speculate.draft.assistant import AcceptanceTallies
from hf_speculate.errors import UnsupportedModelError
from tests.cases import VERIFIERS, assert_decodes_as_plain, assert_equal_ids, each_value, plain_and_ours
from tests.generation.test_compiled import compile_config
from tests.generation.test_law import SIGNIFICANCE, draw, joint_law, p_value
from tests.tiny import make_law_model, make_model, noisy_copy, ragged_prompts
from tests.tiny_tokenizers import letters_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"  # one for each of the target's 64 ids
NUM_DRAWS = 20_000  # one call
LAW_OPTIONS = {"max_new_tokens": 3, "num_assistant_tokens": 2}
SIZES = {"larger": 72, "smaller": 62}


@pytest.fixture(scope="module")
def target():
    return hf_speculate.enable(make_model("llama"))


@pytest.fixture(scope="module")
def tokenizer():
    return letters_tokenizer(CHARACTERS, pad_token="a")


@pytest.fixture(scope="module")
def foreign(target):
    """A draft that knows seven of eight letters, in another order, beside some that the target lacks; its tokenizer."""
    order = [index for index in range(63, -1, -1) if index % 8 != 5]  # the target's ids, by the draft's
    tokens = [*(CHARACTERS[index] for index in order), *"?!;:-+"]
    draft = noisy_copy(make_model("llama", vocab_size=len(tokens)), 0.0)
    near = noisy_copy(target, 0.03)
    draft.model.load_state_dict({**near.model.state_dict(), "embed_tokens.weight": draft.model.embed_tokens.weight})
    draft.model.embed_tokens.weight[: len(order)] = near.model.embed_tokens.weight[order]
    draft.lm_head.weight[: len(order)] = near.lm_head.weight[order]
    return draft, letters_tokenizer(tokens)


def padded_draft(target, size: int):
    """A good draft whose table ends elsewhere, and whose extra ids are the likeliest of all."""
    draft = make_model("llama", vocab_size=size)
    near = noisy_copy(target, 0.03)
    both = min(size, target.config.vocab_size)
    state = {name: weight for name, weight in near.state_dict().items() if weight.shape[0] != 64}
    draft.load_state_dict({**draft.state_dict(), **state})
    for ours, theirs in ((draft.model.embed_tokens, near.model.embed_tokens), (draft.lm_head, near.lm_head)):
        ours.weight[:both] = theirs.weight[:both]
    draft.lm_head.weight[both:] *= 10
    return draft


@pytest.mark.parametrize(("batch_size", "cache"), [(3, "dynamic"), (1, "preallocated")])
@pytest.mark.parametrize("size", SIZES)
def test_padded_greedy_is_plain_greedy(target, tokenizer, size, batch_size, cache):
    tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": copy.deepcopy(tokenizer)}
    options = {**tokenizers, "max_new_tokens": 24, "speculation_cache": cache}
    inputs = ragged_prompts(batch_size, seed=14)
    stats = assert_decodes_as_plain(target, padded_draft(target, SIZES[size]), inputs, **options)
    assert stats.verified_acceptance_rate > 0.3


@each_value(verifier=VERIFIERS, size=SIZES)
def test_fault_d_padded_vocabulary_samples(target, tokenizer, size, verifier):
    """Another size of the same vocabulary raises an AttributeError in transformers, under sampling."""
    stats = hf_speculate.SpeculationStats()
    options = {
        **VERIFIERS[verifier],
        "tokenizer": tokenizer,
        "assistant_tokenizer": tokenizer,
        "assistant_model": padded_draft(target, SIZES[size]),
        "max_new_tokens": 16,
        "num_assistant_tokens": 3,
    }
    inputs = ragged_prompts(3, seed=4)
    ours = target.generate(**inputs, **options, seed=[1, 2, 3], speculation_stats=stats)
    assert ours.max() < 64
    assert not stats.status  # no bad draft id among them
    assert stats.num_accepted > 0
    alone = target.generate(inputs["input_ids"][1:2], attention_mask=inputs["attention_mask"][1:2], **options, seed=2)
    assert torch.equal(ours[1], alone[0])


@pytest.mark.parametrize(("size", "verifier"), [(6, "rejection"), (11, "block"), (11, "coupled")])
def test_padded_draws_have_the_law_of_the_target(size, verifier):
    target = hf_speculate.enable(make_law_model(8, seed=0, dtype=torch.float32))
    draft = make_law_model(size, seed=1, sharpness=1.5, dtype=torch.float32)
    letters = letters_tokenizer("abcdefgh")
    options = {"verifier": verifier, "tokenizer": letters, "assistant_tokenizer": letters, **LAW_OPTIONS}
    assert p_value(draw(target, draft, NUM_DRAWS, **options), joint_law(target, 3)) > SIGNIFICANCE


@each_value(batch_size=[1, 4], options=[{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}])
def test_another_tokenizer_greedy_is_plain_greedy(target, tokenizer, foreign, batch_size, options):
    draft, theirs = foreign
    tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": theirs}
    inputs = ragged_prompts(batch_size, seed=5)
    stats = assert_decodes_as_plain(target, draft, inputs, max_new_tokens=32, **tokenizers, **options)
    assert stats.num_accepted > 0


@pytest.fixture(scope="module")
def law_pair():
    """A target of the letters a to h, a draft of some of them and others, and the two tokenizers as options."""
    target = hf_speculate.enable(make_law_model(8, seed=0, dtype=torch.float32))
    draft = make_law_model(9, seed=1, sharpness=1.5, dtype=torch.float32)
    options = {"tokenizer": letters_tokenizer("abcdefgh"), "assistant_tokenizer": letters_tokenizer("hgfexyzda")}
    return target, draft, options


@pytest.mark.parametrize("verifier", ["rejection", "block", "coupled"])
def test_another_tokenizer_keeps_the_law(law_pair, verifier):
    target, draft, options = law_pair
    counts = draw(target, draft, NUM_DRAWS, verifier=verifier, top_k=5, **options, **LAW_OPTIONS)
    assert p_value(counts, joint_law(target, 3, top_k=5)) > SIGNIFICANCE


def test_fault_e_the_draft_model_stays_as_it_is(target, tokenizer, foreign):
    """transformers replaces the draft's head and embeddings, under sampling."""
    draft, assistant_tokenizer = foreign
    modules = dict(draft.named_modules())
    weights = {name: weight.clone() for name, weight in draft.state_dict().items()}
    config = copy.deepcopy(draft.generation_config.to_dict())
    options = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer, "max_new_tokens": 8}
    target.generate(**ragged_prompts(2, seed=7), assistant_model=draft, do_sample=True, **options)
    assert {name: id(module) for name, module in draft.named_modules()} == {
        name: id(module) for name, module in modules.items()
    }
    assert all(torch.equal(weights[name], weight) for name, weight in draft.state_dict().items())
    assert draft.generation_config.to_dict() == config


@pytest.mark.parametrize(("batch_size", "do_sample"), [(3, False), (1, True)])
def test_copies_go_beside_a_draft_of_another_tokenizer(target, tokenizer, foreign, batch_size, do_sample):
    draft, theirs = foreign
    inputs = ragged_prompts(batch_size, seed=2)
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 40, "speculation_stats": stats}
    if do_sample:  # the text that every draft gives with a seed
        options |= {"do_sample": True, "verifier": "coupled", "seed": 3}
    plain = target.generate(**inputs, **options)
    store = hf_speculate.SuffixStore()
    store.add(plain[0, -20:].tolist())  # what comes late is known
    options |= {"assistant_model": draft, "tokenizer": tokenizer, "assistant_tokenizer": theirs}
    options |= {"prompt_lookup_num_tokens": 5, "suffix_store": store, "num_assistant_tokens": 2}
    assert_equal_ids(plain, target.generate(**inputs, **options))
    assert stats.rounds_by_draft_len[2] > 0  # of the model
    assert max(stats.rounds_by_draft_len) > 2  # of copies


@pytest.mark.slow
@pytest.mark.parametrize("source", ["another tokenizer", "early exit", "generator"])
def test_drafts_that_are_not_compiled_leave_the_target_so(target, tokenizer, foreign, source):
    draft, theirs = foreign
    given = {
        "another tokenizer": {"assistant_model": draft, "tokenizer": tokenizer, "assistant_tokenizer": theirs},
        "early exit": {"assistant_early_exit": 1},
        "generator": {"candidate_generator": PromptLookupCandidateGenerator(max_length=99)},
    }
    inputs = ragged_prompts(1 if source == "generator" else 2, seed=8)
    plain = target.generate(**inputs, max_new_tokens=24)
    stats = hf_speculate.SpeculationStats()
    options = {"num_assistant_tokens": 2, "speculation_stats": stats, **given[source]}
    ours = target.generate(**inputs, max_new_tokens=24, compile_config=compile_config(), **options)
    assert_equal_ids(plain, ours)
    assert stats.compiled == ["target"]
    assert stats.num_drafted > 0
    if source != "generator":
        assert any(reason.startswith("eager forwards of the draft: ") for reason in stats.fallbacks)


def save_tokenizer(folder, tokens) -> str:
    letters_tokenizer(tokens).save_pretrained(folder)
    make_model("llama").config.save_pretrained(folder)
    return str(folder)


def test_tokenizers_are_looked_up_in_local_files(target, tmp_path, monkeypatch):
    draft = padded_draft(target, 72)
    looked_up = []
    load = AutoTokenizer.from_pretrained

    def watched(name, **options):
        looked_up.append((name, options["local_files_only"]))
        return load(name, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", watched)
    ours, theirs = (save_tokenizer(tmp_path / name, CHARACTERS) for name in ("target", "draft"))
    monkeypatch.setattr(target, "name_or_path", ours)
    draft.name_or_path = theirs
    options = {"max_new_tokens": 12, "num_assistant_tokens": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (target.generate(**ragged_prompts(1, seed=9), assistant_model=draft, **options) for _ in "ab")
    assert torch.equal(first, second)
    assert looked_up == [(ours, True), (theirs, True)]  # once, whatever the number of calls
    draft.name_or_path = save_tokenizer(tmp_path / "other", CHARACTERS[::-1])
    with pytest.raises(UnsupportedModelError, match="their tokenizers differ; pass tokenizer= and"):
        target.generate(**ragged_prompts(1, seed=9), assistant_model=draft, **options)


def test_near_sizes_without_tokenizers_are_padding_with_one_warning(target):
    draft = padded_draft(target, 72)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain, ours = plain_and_ours(target, draft, ragged_prompts(2, seed=10), max_new_tokens=20)
    assert_equal_ids(plain, ours)
    (warning,) = caught
    assert "the target has 64 ids and the draft 72; their tokenizers were not found" in str(warning.message)


@pytest.mark.parametrize(("size", "eos_token_id"), [(64 + 1025, None), (72, 5)])
def test_sizes_far_apart_or_other_ends_are_refused(target, size, eos_token_id):
    draft = make_model("llama", vocab_size=size)
    draft.generation_config.eos_token_id = eos_token_id
    with pytest.raises(UnsupportedModelError, match=f"got {size} tokens and their tokenizers were not found; pass tok"):
        target.generate(**ragged_prompts(1, seed=11), assistant_model=draft)


NUM_JUDGED = 64  # draft tokens, before which no pair is warned of


def shifted_draft(target):
    """A draft whose first token is always wrong, as with another vocabulary of the same size."""
    draft = noisy_copy(target, 0.0)
    draft.lm_head.weight.copy_(target.lm_head.weight.roll(1, 0))
    return draft


def test_next_to_no_acceptance_earns_one_warning_with_both_names(target, tokenizer, monkeypatch):
    draft = shifted_draft(target)
    monkeypatch.setattr(target, "name_or_path", "the/target")
    draft.name_or_path = "the/draft"
    prompts = ragged_prompts(3, seed=13)
    attributes = set(vars(target)), set(vars(draft))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**prompts, assistant_model=draft, max_new_tokens=4, num_assistant_tokens=5)  # too few drafts
        told = {"tokenizer": tokenizer, "assistant_tokenizer": tokenizer}
        target.generate(**prompts, **told, assistant_model=draft, max_new_tokens=30, num_assistant_tokens=5)
        good = noisy_copy(target, 0.03)
        for _ in range(3):
            target.generate(**prompts, assistant_model=good, max_new_tokens=30, num_assistant_tokens=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            target.generate(**prompts, assistant_model=draft, max_new_tokens=30, num_assistant_tokens=5)
    (warning,) = caught
    assert "of the/target and the/draft have the same size but may differ" in str(warning.message)
    assert warning.filename == __file__
    assert (set(vars(target)), set(vars(draft))) == attributes


def test_next_to_no_acceptance_adds_up_over_calls_of_the_default_schedule():
    target = hf_speculate.enable(make_model("llama", vocab_size=2000, num_hidden_layers=6))
    draft = make_model("llama", vocab_size=2000, num_hidden_layers=1, seed=5)
    num_verified = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while sum(num_verified) < NUM_JUDGED and len(num_verified) < 60:
            assert not caught
            stats = hf_speculate.SpeculationStats()
            prompts = ragged_prompts(3, seed=len(num_verified), vocab_size=2000)
            target.generate(**prompts, assistant_model=draft, max_new_tokens=16, speculation_stats=stats)
            num_verified.append(stats.num_verified)
        (warning,) = caught
        assert max(num_verified) < NUM_JUDGED
        target.generate(**prompts, assistant_model=draft, max_new_tokens=16)
        assert caught == [warning]


def test_low_acceptance_is_found_once_per_draft_model():
    low = hf_speculate.SpeculationStats(num_verified=40)
    tallies, draft, other = AcceptanceTallies(), make_model("llama"), make_model("llama")
    assert [tallies.add(one, low) for one in (draft, other, draft, draft)] == [False, False, True, False]
    weak = weakref.ref(draft)
    del draft
    gc.collect()
    assert weak() is None
    assert tallies.add(other, low)
