"""List the faults of transformers' assisted generation, as of 5.23, and the tests for them.

Paths are relative to `tests/`:

- a: a prefilled cache is fed the whole prompt again. `generation/test_matrix.py`, ids, scores,
  states and cache
- b: stopping criteria are checked only when a block ends, so text runs on.
  `generation/test_options.py`
- c: `stop_strings` with an assistant raises. `generation/test_options.py`
- d: sampling with a padded vocabulary raises. `generation/test_vocabularies.py`
- e: a different tokenizer makes transformers replace layers of the draft model.
  `generation/test_vocabularies.py`
- f: an argmax with logits is biased. `options/candidates/test_candidate_generators.py`
- g: a threshold of None turns into 0.4. `test_config.py`
- h: a pipeline raises if its draft has another EOS, PAD or BOS. `generation/test_pipeline.py`
- i: the heuristic schedule writes into the draft model's config. This file
- j: batches, several sequences, static caches and compiling raise. `generation/test_matrix.py`
- k: every round runs a whole `generate()` of the draft model. This file
- l: lookup takes the left-most match of 2 tokens. `draft/test_suffix.py`
- m: verification copies keys and values to all query heads. `models/test_folded_attention.py`
"""

import functools

from transformers import GenerationMixin

from hf_speculate import SpeculationStats
from tests.cases import ACCEPTED_ALL, assert_decodes_as_plain, each_value, new_pair
from tests.support.tiny import ragged_prompts

NUM_NEW = 24


def test_fault_i_call_does_not_change_the_next():
    target, draft = new_pair("llama", ACCEPTED_ALL)
    configs = [model.generation_config.to_dict() for model in (target, draft)]
    options = {
        "max_new_tokens": 40,
        "num_assistant_tokens_schedule": "heuristic",
        "num_assistant_tokens": 3,
    }
    first, second = (
        assert_decodes_as_plain(
            target, draft, ragged_prompts(1, seed=7), **options
        ).rounds_by_draft_len
        for _ in "ab"
    )
    assert first == second
    assert len(first) > 2  # the schedule changed the draft length
    assert [model.generation_config.to_dict() for model in (target, draft)] == configs


@each_value(do_sample=[False, True], batch_size=[1, 3])
def test_fault_k_round_runs_k_draft_forwards_and_no_generate(monkeypatch, batch_size, do_sample):
    target, draft = new_pair()
    plain, generates, forwards, stats = GenerationMixin.generate, [], [], SpeculationStats()

    @functools.wraps(plain)
    def counted(self, *args, **kwargs):
        generates.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", counted)
    embeddings = draft.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda _, args: forwards.append(args[0].shape[1]))
    options = {
        "max_new_tokens": NUM_NEW,
        "do_sample": do_sample,
        "num_assistant_tokens": 4,
        "seed": 2,
    }
    target.generate(
        **ragged_prompts(batch_size, seed=9),
        assistant_model=draft,
        speculation_stats=stats,
        **options,
    )
    assert generates == [target]
    assert len(forwards) == sum(num * count for num, count in stats.rounds_by_draft_len.items())
    # A round starts with the newest token, preceded by the last drafted one if all were accepted.
    if batch_size == 1:
        assert sum(width > 1 for width in forwards[1:]) <= stats.accepted_per_position[-1]
