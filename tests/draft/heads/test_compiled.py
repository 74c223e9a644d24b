"""Compiled targets return the hidden states that heads read."""

from dataclasses import replace

import pytest

import hf_speculate
from hf_speculate.draft.heads.load import load_drafter
from tests.cases import assert_equal_ids
from tests.draft.heads.designs import EAGLE3, MTP, VOCAB_SIZE, make_weights, write_speculators
from tests.draft.heads.fitting import fitted_weights
from tests.draft.heads.rounds import NUM_TARGET_LAYERS, TARGET_WIDTH
from tests.draft.heads.test_generate import FITTED, prompts
from tests.generation.test_compiled import compile_config
from tests.tiny import make_model

OPTIONS = {"max_new_tokens": 24, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}


@pytest.fixture(scope="module")
def target():
    model = make_model("llama", vocab_size=VOCAB_SIZE, hidden_size=TARGET_WIDTH, num_hidden_layers=NUM_TARGET_LAYERS)
    return hf_speculate.enable(model)


def stats_of(target, head, **options):
    stats = hf_speculate.SpeculationStats()
    ids = target.generate(**prompts(), **OPTIONS, assistant_model=head, speculation_stats=stats, **options)
    return ids, stats


def test_rounds_of_a_compiled_target_are_those_of_an_eager_one(target, tmp_path):
    plain = target.generate(**prompts(), max_new_tokens=24)
    rows = [text[mask.argmax() :].tolist() for text, mask in zip(plain, prompts()["attention_mask"], strict=True)]
    design = replace(FITTED, aux_layers=(0, 3, 5))
    head = load_drafter(write_speculators(tmp_path, design, fitted_weights(design, target, rows)), target)
    eager, before = stats_of(target, head)
    ids, after = stats_of(target, head, compile_config=compile_config())
    assert_equal_ids(plain, ids)
    assert_equal_ids(plain, eager)
    assert "target" in after.compiled
    assert after.fallbacks == []
    assert after.accepted_per_position == before.accepted_per_position
    assert min(after.accepted_per_position) > 0


@pytest.mark.parametrize(
    ("design", "is_compiled"),
    [(MTP, True), (replace(EAGLE3, aux_layers=(1, NUM_TARGET_LAYERS)), False)],
    ids=["after the final norm", "before the final norm"],
)
def test_which_states_compiled_targets_return(target, tmp_path, design, is_compiled):
    head = load_drafter(write_speculators(tmp_path, design, make_weights(design)), target)
    ids, stats = stats_of(target, head, compile_config=compile_config())
    assert_equal_ids(target.generate(**prompts(), max_new_tokens=24), ids)
    assert ("target" in stats.compiled) is is_compiled
    assert ("state before the final norm" in " ".join(stats.fallbacks)) is not is_compiled
