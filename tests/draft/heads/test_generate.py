"""Heads inside `generate()`: the text is plain decoding's, whatever the head proposes."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import MaxTimeCriteria, pipeline

import hf_speculate
from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.engine.model_state import model_state
from hf_speculate.errors import UnsupportedGenerationError, UnsupportedModelError
from tests.cases import assert_equal_ids, each_value
from tests.draft.heads.designs import (
    DFLASH,
    DSPARK,
    EAGLE3,
    NUM_TARGET_LAYERS,
    TARGET_WIDTH,
    VOCAB_SIZE,
    make_weights,
    write_speculators,
)
from tests.draft.heads.fitting import write_fitted
from tests.draft.heads.kinds import KINDS
from tests.generation.test_law import SIGNIFICANCE, draw, joint_law, p_value
from tests.tiny import make_law_model, make_model, ragged_prompts
from tests.tiny_tokenizers import byte_level_tokenizer

NUM_NEW = 24
NUM_DRAWS = 8_000  # of 512 texts
NUM_DRAWN = 3  # tokens of each: the prompt's forward gives the first, a round the others
SOME_IDS = tuple(index for index in range(VOCAB_SIZE) if index % 8)
FITTED = replace(EAGLE3, hidden_size=64, head_dim=16, draft_ids=SOME_IDS, aux_layers=(1, 3, NUM_TARGET_LAYERS))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target, and a head that knows its greedy texts of `prompts()` by heart, but for some tokens."""
    target = make_model("llama", vocab_size=VOCAB_SIZE, hidden_size=TARGET_WIDTH, num_hidden_layers=NUM_TARGET_LAYERS)
    target = hf_speculate.enable(target)
    folder, _ = write_fitted(tmp_path_factory.mktemp("fitted"), FITTED, target, prompts(), NUM_NEW)
    return target, load_drafter(folder, target)


def prompts(batch_size: int = 3):
    inputs = ragged_prompts(3, seed=0, vocab_size=VOCAB_SIZE)
    return {name: part[3 - batch_size :] for name, part in inputs.items()}


def ours_and_plain(pair, inputs=None, **options):
    target, head = pair[0], pair[1].with_layers(pair[1].hidden_layers)  # without estimates of other calls
    stats = hf_speculate.SpeculationStats()
    inputs = inputs or prompts()
    options = {"max_new_tokens": NUM_NEW, **options}
    own = {
        name: options.pop(name)
        for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "speculation_cache")
        if name in options
    }
    ours = target.generate(
        **inputs, **options, assistant_model=head, speculation_stats=stats, **{"num_assistant_tokens": 4, **own}
    )
    return ours, target.generate(**inputs, **options), stats


@each_value(kind=KINDS, batch_size=[1, 3])
def test_greedy_text_is_plain_for_every_kind(kind, batch_size, tmp_path):
    head, target = KINDS[kind](tmp_path)
    target = hf_speculate.enable(target)
    inputs, stats = prompts(batch_size), hf_speculate.SpeculationStats()
    options = {"assistant_model": head, "num_assistant_tokens": 3, "speculation_stats": stats}
    ours = target.generate(**inputs, max_new_tokens=NUM_NEW, **options)
    hf_speculate.disable(target)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=NUM_NEW), ours)
    assert max(stats.rounds_by_draft_len) == 3


CASES = {
    "one row": {"inputs": prompts(1)},
    "batch": {},
    "dynamic cache": {"speculation_cache": "dynamic"},
    "adaptive": {"num_assistant_tokens": 6, "num_assistant_tokens_schedule": "adaptive"},
    "prompts in chunks": {"prefill_chunk_size": 5},
    "one token": {"inputs": {"input_ids": torch.tensor([[5], [9]])}},
    "processors": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "lock step": {"logits_processor": [lambda ids, scores: scores + (ids[:, -1:] % 3)]},
    "several of each": {"num_return_sequences": 2, "do_sample": True, "verifier": "coupled", "seed": 3},
    "coupled": {"do_sample": True, "verifier": "coupled", "seed": 5, "temperature": 0.7},
    "coupled, warped": {"do_sample": True, "verifier": "coupled", "seed": 5, "top_k": 5, "top_p": 0.9},
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_plain(pair, name):
    ours, plain, stats = ours_and_plain(pair, **CASES[name])
    assert_equal_ids(plain, ours)
    assert stats.num_accepted > 0


def test_no_hook_stays_on_the_target(pair):
    target, head = pair
    assert NUM_TARGET_LAYERS in head.hidden_layers
    before = len(target.model.layers[-1]._forward_hooks)
    with pytest.raises(ZeroDivisionError):
        target.generate(**prompts(), assistant_model=head, max_new_tokens=8, speculation_callback=lambda report: 1 / 0)
    assert len(target.model.layers[-1]._forward_hooks) == before


def law_pair(kind: str, folder):
    target = make_law_model(8, seed=0, dtype=torch.float32, num_hidden_layers=2)
    fields = {"hidden_size": 16, "target_hidden_size": 16, "vocab_size": 8, "draft_ids": (1, 2, 3, 5, 6, 7)}
    fields |= {"num_heads": 2, "num_kv_heads": 1}
    design = {
        "EAGLE-3": replace(EAGLE3, aux_layers=(0, 1, 2), **fields),
        "DFlash": replace(DFLASH, aux_layers=(0, 1, 2), **fields),
        "DSpark": replace(DSPARK, aux_layers=(0, 1, 2), **fields),
    }[kind]
    weights = make_weights(design, seed=1)
    weights["lm_head.weight"] /= 8  # flat enough that every token comes
    return hf_speculate.enable(target), load_drafter(write_speculators(folder, design, weights), target)


@pytest.mark.parametrize(("kind", "verifier"), [("EAGLE-3", "rejection"), ("DFlash", "block"), ("DSpark", "coupled")])
def test_the_joint_distribution_is_the_targets_with_a_smaller_vocabulary(kind, verifier, tmp_path):
    target, head = law_pair(kind, tmp_path)
    stats = hf_speculate.SpeculationStats()
    options = {"num_assistant_tokens": 2, "max_new_tokens": NUM_DRAWN, "verifier": verifier, "speculation_stats": stats}
    counts = draw(target, head, NUM_DRAWS, **options)
    assert p_value(counts, joint_law(target, NUM_DRAWN)) > SIGNIFICANCE
    assert min(stats.accepted_per_position) > 0


def test_the_adaptive_schedule_knows_a_head_and_remembers_it(pair, tmp_path):
    target, _ = pair
    head = load_drafter(write_speculators(tmp_path / "my-head", FITTED, make_weights(FITTED)), target)
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": 6, "num_assistant_tokens_schedule": "adaptive"}
    history = model_state(target).history
    assert head not in history._by_draft
    stats = hf_speculate.SpeculationStats()
    target.generate(**prompts(), **options, assistant_model=head, speculation_stats=stats)
    assert len(history._by_draft[head]) == 1
    assert "drafter: eagle3 head my-head;" in stats.plan


def test_a_text_longer_than_the_head_was_trained_on_is_decoded_with_a_warning(pair):
    target, head = pair
    options = {"max_length": 513, "assistant_model": head, "num_assistant_tokens": 4}
    stops = {"stopping_criteria": [MaxTimeCriteria(max_time=0.0)]}
    with pytest.warns(UserWarning, match="was trained on texts of up to 512 tokens, and this call may reach 513"):
        target.generate(**prompts(1), **options, **stops)


@pytest.mark.parametrize("form", [str, Path])
def test_a_head_may_be_named(form, pair, tmp_path):
    """It is loaded for the first call and kept with the target."""
    target, _ = pair
    folder = write_speculators(tmp_path / "head", FITTED, make_weights(FITTED))
    options = {"assistant_model": form(folder), "num_assistant_tokens": 2, "max_new_tokens": NUM_NEW}
    stats = hf_speculate.SpeculationStats()
    ours = target.generate(**prompts(), **options, speculation_stats=stats)
    shutil.rmtree(folder)
    assert_equal_ids(ours, target.generate(**prompts(), **options))
    assert_equal_ids(target.generate(**prompts(), max_new_tokens=NUM_NEW), ours)
    assert max(stats.rounds_by_draft_len) == 2


def test_pipelines_take_a_head(tmp_path):
    tokenizer = byte_level_tokenizer([], pad_token="<pad>")
    target = hf_speculate.enable(
        make_model("llama", vocab_size=len(tokenizer), hidden_size=TARGET_WIDTH, num_hidden_layers=NUM_TARGET_LAYERS)
    )
    design = replace(EAGLE3, vocab_size=len(tokenizer))
    head = load_drafter(write_speculators(tmp_path, design, make_weights(design)), target)
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = pipeline("text-generation", model=target, tokenizer=tokenizer)("abc", **options)
    stats = hf_speculate.SpeculationStats()
    write = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=head)
    assert write("abc", **options, num_assistant_tokens=2, speculation_stats=stats) == expected
    assert stats.num_drafted > 0


def test_a_named_folder_must_hold_a_head(pair, tmp_path):
    target, _ = pair
    target.config.save_pretrained(tmp_path)
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="load an ordinary draft model and pass it as assistant_model"):
        target.generate(**prompts(), assistant_model=str(tmp_path))


def test_few_accepted_first_tokens_are_warned_of(pair, tmp_path):
    target, fitted = pair
    head = load_drafter(write_speculators(tmp_path, FITTED, make_weights(FITTED)), target)
    options = {"max_new_tokens": 80, "num_assistant_tokens": 1}
    with pytest.warns(UserWarning, match="fewer than 20% of the first tokens that .* drafted were accepted"):
        target.generate(**prompts(), **options, assistant_model=head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**prompts(), **options, assistant_model=fitted)


@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "draft_state"])
def test_what_needs_a_draft_model_is_refused(pair, name):
    target, head = pair
    value = 4 if name == "prompt_lookup_num_tokens" else hf_speculate.DraftState()
    with pytest.raises(UnsupportedGenerationError, match=f"{name} must be left out with a draft head"):
        target.generate(**prompts(), assistant_model=head, **{name: value})


def test_a_head_of_another_target_is_refused(pair):
    _, head = pair
    other = hf_speculate.enable(make_model("llama", vocab_size=VOCAB_SIZE, hidden_size=TARGET_WIDTH))
    with pytest.raises(UnsupportedModelError, match="must have hidden size 24, 6 layers and 32 tokens, got"):
        other.generate(**prompts(), assistant_model=head, max_new_tokens=4)


def test_the_default_number_of_tokens_bounds_the_adaptive_one(pair):
    target, head = pair[0], pair[1].with_layers(pair[1].hidden_layers)  # without estimates of other calls
    assert head.default_draft_tokens == 4
    stats = hf_speculate.SpeculationStats()
    target.generate(**prompts(), assistant_model=head, max_new_tokens=NUM_NEW, speculation_stats=stats)
    assert max(stats.rounds_by_draft_len) == 4
    options = {"num_assistant_tokens_schedule": "constant", "speculation_stats": stats}
    target.generate(**prompts(), assistant_model=head, max_new_tokens=NUM_NEW, **options)
    assert {num for num, rounds in stats.rounds_by_draft_len.items() if rounds} <= {0, 1, 2, 3, 4}
    assert stats.rounds_by_draft_len[4] > 3
