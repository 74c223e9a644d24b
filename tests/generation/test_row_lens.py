"""A number of drafted tokens per row: every row gets what it gets with its own number, whatever its neighbours."""

import pytest
import torch
from transformers import GenerationConfig

import hf_speculate
from hf_speculate.draft.base import DrafterDefaults
from hf_speculate.errors import ConfigError
from hf_speculate.types import DraftOut
from tests.cases import assert_equal_ids, pair
from tests.tiny import ragged_prompts

LENS = [0, 2, 5]
ENDS = [5, 9, 13, 21, 33, 47]
NUM_NEW = 24


class Repeats(DrafterDefaults):
    """A custom drafter: the newest token, again and again."""

    def __init__(self, setup):
        pass

    def draft(self, request):
        newest = request.query_token_ids[:, -1:]
        lens = torch.full((len(newest),), request.num_draft_tokens, dtype=torch.int32)
        return DraftOut(newest.expand(-1, request.num_draft_tokens), lens, None, None)

    def rows(self, indices):
        pass


SOURCES = {
    "model": {},
    "lookup": {"assistant_model": None, "prompt_lookup_num_tokens": 4},
    "custom": {"assistant_model": None, "drafter": Repeats},
    "both": {"prompt_lookup_num_tokens": 4},
}
LOCK_STEP = {"logits_processor": [lambda ids, scores: scores]}


def decoded(kind, lens, inputs, **options):
    """The new tokens, and the statistics."""
    target, draft = pair(kind)
    stats = hf_speculate.SpeculationStats()
    options = {"assistant_model": draft, "max_new_tokens": NUM_NEW, **options}
    output = target.generate(**inputs, num_assistant_tokens=lens, speculation_stats=stats, **options)
    return output[:, inputs["input_ids"].shape[1] :], stats


@pytest.mark.parametrize(
    ("kind", "source", "options"),
    [
        ("llama", "model", {}),
        ("llama", "model", {"speculation_cache": "dynamic"}),
        ("llama", "model", {"eos_token_id": [5, 9]}),  # rows leave the batch
        ("llama", "model", LOCK_STEP),
        ("gpt2", "lookup", {}),
        ("mistral_window", "both", {}),
        ("falcon_h1", "model", {}),
        ("llama", "custom", {}),
    ],
)
def test_greedy_rows_are_plain_ones_and_draft_no_more_than_their_number(kind, source, options):
    inputs = ragged_prompts(3, seed=3)
    plain = pair(kind)[0].generate(
        **inputs, max_new_tokens=NUM_NEW, **{k: v for k, v in options.items() if k != "speculation_cache"}
    )
    ours, stats = decoded(kind, LENS, inputs, **SOURCES[source], **options)
    assert_equal_ids(plain[:, inputs["input_ids"].shape[1] :], ours)
    most = [0] * 3 if options is LOCK_STEP else [min(num, 4) if source == "lookup" else num for num in LENS]
    rows = zip(stats.drafted_per_row, stats.rounds_per_row, most, strict=True)
    assert all(drafted <= rounds * num for drafted, rounds, num in rows)
    assert [drafted > 0 for drafted in stats.drafted_per_row] == [num > 0 for num in most]
    assert sum(stats.drafted_per_row) == stats.num_drafted
    assert sum(stats.accepted_per_row) == stats.num_accepted
    assert stats.num_accepted or source == "custom" or options is LOCK_STEP
    assert max(stats.rounds_by_draft_len) == max(most)


@pytest.mark.parametrize("verifier", ["rejection", "block", "coupled", "typical"])
def test_sampled_rows_are_those_of_their_own_number(verifier):
    inputs = ragged_prompts(3, seed=4)
    options = {"do_sample": True, "verifier": verifier, "eos_token_id": ENDS, "pad_token_id": 0}
    ours, stats = decoded("llama", LENS, inputs, seed=[7, 8, 9], **options)
    assert stats.num_accepted > 0
    lens = []
    for row, num in enumerate(LENS):
        one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        (alone,), _ = decoded("llama", num or [0], one, seed=[7 + row], **options)
        assert torch.equal(alone, ours[row, : len(alone)])
        lens.append(len(alone))
    assert len(set(lens)) > 1  # rows leave the batch


def test_prompts_with_several_outputs_have_a_number_for_each_output():
    inputs, options = ragged_prompts(2, seed=5), {"do_sample": True, "num_return_sequences": 2, "seed": [1, 2, 3, 4]}
    ours, stats = decoded("llama", [0, 3, 2, 0], inputs, **options)
    assert [num > 0 for num in stats.drafted_per_row] == [False, True, True, False]
    same, _ = decoded("llama", [3, 3, 3, 3], inputs, **options)
    assert torch.equal(ours[1], same[1])


def test_a_list_in_a_generation_config_counts():
    target, draft = pair("llama")
    stats = hf_speculate.SpeculationStats()
    config = GenerationConfig(num_assistant_tokens=[0, 2], max_new_tokens=NUM_NEW)
    target.generate(
        **ragged_prompts(2, seed=1), generation_config=config, assistant_model=draft, speculation_stats=stats
    )
    assert stats.drafted_per_row[0] == 0 < stats.drafted_per_row[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_assistant_tokens": [1, 2]}, "one int per output row, 3 of them, got 2; pass one int"),
        ({"num_assistant_tokens": [1, 2, 129]}, r"a list of one number in 0..128 per output row, got \[1, 2, 129\]"),
        ({"num_assistant_tokens": []}, "a list of one number"),
        (
            {"num_assistant_tokens": [1, 2, 3], "num_assistant_tokens_schedule": "adaptive"},
            "must be 'constant' with a number of num_assistant_tokens per row, got 'adaptive'; leave it out",
        ),
    ],
)
def test_a_list_that_cannot_count_is_refused(options, message):
    target, draft = pair("llama")
    with pytest.raises(ConfigError, match=message):
        target.generate(**ragged_prompts(3, seed=1), max_new_tokens=4, assistant_model=draft, **options)
