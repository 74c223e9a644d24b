"""Each fault of transformers' assisted generation, and the test that would find it here."""

import functools
from pathlib import Path

from transformers import GenerationMixin

from hf_speculate import SpeculationStats
from tests.cases import ACCEPTED_ALL, assert_decodes_as_plain, each_value, new_pair
from tests.tiny import ragged_prompts

# The test of each fault, below `tests/generation/`, with what transformers 5.23 does.
FAULTS = {
    # a prefilled past_key_values is fed the whole prompt again
    "a": "test_matrix.py::test_ids_scores_states_and_cache",
    # criteria are looked at when a block ends, so text runs on; stop_strings with an assistant raise
    "b": "test_options.py::test_drafts_that_a_stop_cuts_off",
    "c": "test_options.py::test_stop_strings_end_the_text",
    # under sampling, a padded vocabulary raises and another tokenizer replaces layers of the draft model
    "d": "test_vocabularies.py::test_fault_d",
    "e": "test_vocabularies.py::test_fault_e",
    "f": "../options/candidates/test_candidate_generators.py::test_fault_f",  # an argmax with logits is biased
    "g": "../test_config.py::test_schedules_and_thresholds_count",  # a threshold of None turns into 0.4
    "h": "test_pipeline.py::test_fault_h",  # a pipeline whose draft has another EOS, PAD or BOS raises
    # the heuristic schedule writes into the draft model's config
    "i": "test_faults_of_transformers.py::test_fault_i",
    "j": "test_matrix.py::test_ids_scores",  # batches, several sequences, static caches and compiling raise
    "k": "test_faults_of_transformers.py::test_fault_k",  # every round is a whole generate() of the draft model
    "l": "../draft/test_suffix.py::test_a_shorter_ngram",  # lookup takes the left-most match of 2 tokens
    # verification copies keys and values to all query heads
    "m": "../models/test_folded_attention.py::test_a_speculative_call_folds",
}

NUM_NEW = 24


def test_every_fault_has_a_test_where_the_index_says():
    for path in FAULTS.values():
        name, _, test = path.partition("::")
        assert f"\ndef {test}" in (Path(__file__).parent / name).read_text(), path


def test_fault_i_one_request_does_not_change_the_next():
    target, draft = new_pair("llama", ACCEPTED_ALL)
    configs = [model.generation_config.to_dict() for model in (target, draft)]
    options = {"max_new_tokens": 40, "num_assistant_tokens_schedule": "heuristic", "num_assistant_tokens": 3}
    first, second = (
        assert_decodes_as_plain(target, draft, ragged_prompts(1, seed=7), **options).rounds_by_draft_len for _ in "ab"
    )
    assert first == second
    assert len(first) > 2  # the schedule did move
    assert [model.generation_config.to_dict() for model in (target, draft)] == configs


@each_value(do_sample=[False, True], batch_size=[1, 3])
def test_fault_k_a_round_is_k_forwards_of_the_draft_and_no_generate(monkeypatch, batch_size, do_sample):
    target, draft = new_pair()
    plain, generates, forwards, stats = GenerationMixin.generate, [], [], SpeculationStats()

    @functools.wraps(plain)
    def counted(self, *args, **kwargs):
        generates.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", counted)
    embeddings = draft.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda _, args: forwards.append(args[0].shape[1]))
    options = {"max_new_tokens": NUM_NEW, "do_sample": do_sample, "num_assistant_tokens": 4, "seed": 2}
    target.generate(**ragged_prompts(batch_size, seed=9), assistant_model=draft, speculation_stats=stats, **options)
    assert generates == [target]
    assert len(forwards) == sum(num * count for num, count in stats.rounds_by_draft_len.items())
    if batch_size == 1:  # a round begins with the newest token, and with the last drafted one if all were accepted
        assert sum(width > 1 for width in forwards[1:]) <= stats.accepted_per_position[-1]
