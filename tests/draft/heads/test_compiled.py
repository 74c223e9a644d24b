"""Compiled targets return the hidden states that heads read, and heads draft a chain as one compiled unit."""

from dataclasses import replace

import pytest

import hf_speculate
from hf_speculate.draft.heads.load import load_drafter
from tests.cases import assert_equal_ids
from tests.draft.heads.designs import EAGLE3, MTP, VOCAB_SIZE, make_weights, write_speculators
from tests.draft.heads.fitting import write_fitted
from tests.draft.heads.rounds import NUM_TARGET_LAYERS, TARGET_WIDTH
from tests.draft.heads.test_generate import FITTED, prompts
from tests.generation.test_compiled import compile_config, runs  # noqa: F401  # a fixture
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


SAMPLING = {"do_sample": True, "top_k": 0, "seed": 5}


@pytest.mark.parametrize("sampling", [{}, SAMPLING, {**SAMPLING, "verifier": "coupled"}], ids=["greedy", "", "coupled"])
def test_compiled_rounds_are_those_of_eager_ones(target, tmp_path, sampling, runs):  # noqa: F811
    plain = target.generate(**prompts(), max_new_tokens=24)
    design = replace(FITTED, aux_layers=(0, 3, 5))
    head = load_drafter(write_fitted(tmp_path, design, target, prompts(), 24)[0], target)
    eager, before = stats_of(target, head, **sampling)
    ids, after = stats_of(target, head, **sampling, compile_config=compile_config())
    assert_equal_ids(eager, ids)
    if not sampling:
        assert_equal_ids(plain, ids)
    assert {name.partition(" of ")[0] for name, _ in runs} == {"forward with (0, 3, 5)", "chain"}
    assert after.compiled == ["target", "draft"]
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
