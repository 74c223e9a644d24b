"""A number of drafted tokens per row: every row gets what it gets with its own number, whatever its neighbours."""

import pytest
import torch
from transformers import GenerationConfig

import hf_speculate
from hf_speculate.errors import ConfigError
from tests.cases import assert_equal_ids, pair
from tests.tiny import ragged_prompts

LENS = [0, 2, 5]
ENDS = [5, 9, 13, 21, 33, 47]
NUM_NEW = 24


SOURCES = {
    "model": {},
    "lookup": {"assistant_model": None, "prompt_lookup_num_tokens": 4},
    "both": {"prompt_lookup_num_tokens": 4},
}
LOCK_STEP = {"logits_processor": [lambda ids, scores: scores]}


def decoded(kind, lens, inputs, **options):
    """The new tokens, and the statistics."""
    target, draft = pair(kind)
    stats = hf_speculate.SpeculationStats()
    options = {"assistant_model": draft, "max_new_tokens": NUM_NEW, **options}
    own = {} if lens is None else {"num_assistant_tokens": lens}
    output = target.generate(**inputs, **own, speculation_stats=stats, **options)
    return output[:, inputs["input_ids"].shape[1] :], stats


@pytest.mark.parametrize(
    ("kind", "source", "options"),
    [
        ("llama", "model", {"eos_token_id": [5, 9]}),  # rows leave the batch
        ("llama", "model", LOCK_STEP),
        ("gpt2", "lookup", {}),
        ("mistral_window", "both", {}),
        ("falcon_h1", "model", {}),
    ],
)
def test_greedy_rows_are_plain_ones_and_draft_no_more_than_their_number(kind, source, options):
    inputs = ragged_prompts(3, seed=3)
    plain = pair(kind)[0].generate(**inputs, max_new_tokens=NUM_NEW, **options)
    ours, stats = decoded(kind, LENS, inputs, **SOURCES[source], **options)
    assert_equal_ids(plain[:, inputs["input_ids"].shape[1] :], ours)
    most = [0] * 3 if options is LOCK_STEP else [min(num, 4) if source == "lookup" else num for num in LENS]
    for drafted, rounds, num in zip(stats.drafted_per_row, stats.rounds_per_row, most, strict=True):
        assert drafted <= rounds * num
        assert (drafted > 0) == (num > 0)
    assert sum(stats.drafted_per_row) == stats.num_drafted
    assert sum(stats.accepted_per_row) == stats.num_accepted
    assert stats.num_accepted or options is LOCK_STEP


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


def test_a_list_in_a_config_counts_for_the_outputs_of_each_prompt():
    config = GenerationConfig(num_assistant_tokens=[0, 3, 2, 0], max_new_tokens=NUM_NEW)
    options = {"do_sample": True, "num_return_sequences": 2, "seed": [1, 2, 3, 4]}
    _, stats = decoded("llama", None, ragged_prompts(2, seed=5), generation_config=config, **options)
    assert [num > 0 for num in stats.drafted_per_row] == [False, True, True, False]


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        ([1, 2], "one int per output row, 3 of them, got 2"),
        ([1, 2, 129], r"in 0..128 per output row, got \[1, 2, 129\]"),
        ([], "a list of one number"),
    ],
)
def test_a_list_that_cannot_count_raises(lens, message):
    with pytest.raises(ConfigError, match=message):
        decoded("llama", lens, ragged_prompts(3, seed=1))
    with pytest.raises(ConfigError, match="must be 'constant' with a number of num_assistant_tokens per row"):
        decoded("llama", [1, 2, 3], ragged_prompts(3, seed=1), num_assistant_tokens_schedule="adaptive")
