"""Test prompt lookup: the suffix index, its drafts, and the text of whole calls."""

import random
from array import array

import pytest
import torch
from transformers import GenerationConfig

from hf_speculate import SpeculationStats, enable
from hf_speculate.draft.acceptance_rates import suffix_rates
from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings
from hf_speculate.draft.suffix_index import MAX_MATCH_LEN, SEPARATOR, SuffixIndex
from hf_speculate.options.sources.suffix_store import SuffixStore
from tests.cases import assert_decodes_as_plain, each_value, pair
from tests.support.tiny import make_model, ragged_prompts


def latest_longest(text: list[int], last: list[int]) -> tuple[int, int]:
    """Return length and end of the latest longest match for a suffix of `last`."""
    for length in range(len(last), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == last[len(last) - length :] and text[end] != SEPARATOR:
                return length, end
    return 0, 0


@each_value(most=[1, 2, 5, MAX_MATCH_LEN], vocab_size=[1, 2, 3, 6])
def test_match_is_the_latest_of_the_longest(vocab_size, most):
    generator = random.Random(vocab_size)
    for _ in range(25):
        text, index = generator.choices(range(vocab_size), k=40), SuffixIndex()
        for num, token in enumerate(text, 1):
            index.extend([token])
            last = text[max(num - most, 0) : num]
            assert index.find(array("i", last)) == latest_longest(text[:num], last)


def test_tokens_of_another_text_match_within_one_sequence():
    generator = random.Random(1)
    for _ in range(50):
        text, last = generator.choices([SEPARATOR, 0, 1, 2], k=40), generator.choices(range(4), k=5)
        index = SuffixIndex()
        index.extend(text)
        assert index.find(array("i", last)) == latest_longest(text, last)


def begun(texts, **settings):
    """Make a drafter that has read prompts of equal length and looked up their last tokens."""
    drafter = SuffixDrafter(SuffixSettings(**{"max_draft_tokens": 10, **settings}))
    drafter.begin(torch.tensor([text[:-1] for text in texts]))
    drafter.look_up([text[-1:] for text in texts])
    return drafter


def draft_of(texts, num=10, **settings):
    """Propose drafts for texts of equal length."""
    return proposed(begun(texts, **settings), num)


def proposed(drafter, num=10):
    """Return the valid proposed tokens as lists."""
    draft = drafter.cut_proposal(num)
    rows = zip(draft.token_ids.tolist(), draft.lens.tolist(), strict=True)
    return [ids[:length] for ids, length in rows]


def test_proposal_follows_the_longest_match():
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 7, 2, 3]
    assert draft_of([text], num=4) == [[5, 8, 3, 6]]
    assert draft_of([text], num=3, max_match_len=1) == [[6, 7, 2]]
    assert draft_of([text], max_draft_tokens=2) == [[5, 8]]


def test_row_without_a_match_proposes_nothing():
    assert draft_of([[1, 2, 3, 4], [5, 6, 7, 5]], num=3) == [[], [6, 7, 5]]


def test_probabilities_follow_past_matches():
    drafter = SuffixDrafter(SuffixSettings(10))
    period = [1, 2, 3, 4, 5]
    drafter.begin(torch.tensor([period, [9, 1, 8, 7, 6]]))
    # The first row continues its period. In the second row, 1 is followed by a new token each time.
    for number in range(40):
        others = [20 + number // 2] if number % 2 else [1]
        probabilities = drafter.look_up([[period[number % 5]], others])
        if number == 0:
            before = probabilities
    assert len(probabilities[0]) == 10
    assert probabilities[0][-1] > 0.8
    assert drafter.look_up([[1], [1]])[1][0] < 0.15 < before[1][0]


def test_rates_learn_from_proposals_that_were_not_drafted():
    drafter = begun([[1, 2, 3, 1]])
    (before, *_), *_ = [row.probabilities() for row in drafter.texts]
    for number in range(60):
        ((first, *_),) = drafter.look_up([[2, 9 + number, 1]])
    assert first > before


def test_shared_rates_cover_all_rows():
    shared = suffix_rates()
    first = SuffixDrafter(SuffixSettings(10), make_rates=lambda: shared)
    first.begin(torch.tensor([[1, 2, 3]]))
    for number in range(60):
        first.look_up([[50 + number, 1]])  # 1 is followed by a new token each time
    second = SuffixDrafter(SuffixSettings(10), make_rates=lambda: shared)
    second.begin(torch.tensor([[1, 2, 3]]))
    alone = begun([[1, 2, 3, 1]])
    ((known, *_),) = second.look_up([[1]])
    assert known < alone.texts[0].probabilities()[0]


def test_padding_is_never_matched():
    assert draft_of([[0, 0, 0, 5], [0, 7, 8, 0]], num_pads=[3, 1]) == [[], []]
    assert draft_of([[0, 0, 0, 5], [0, 7, 8, 0]], num=3) == [[], [7, 8, 0]]


def test_proposals_end_at_eos():
    text = [1, 2, 3, 4, 5, 1, 2]
    assert draft_of([text], eos_token_ids=frozenset([4, 60])) == [[3, 4]]
    assert draft_of([text], num=4, eos_token_ids=frozenset([9])) == [[3, 4, 5, 1]]


def test_row_without_new_tokens_has_ended():
    drafter = begun([[5, 6, 7, 5], [5, 6, 7, 5]])
    assert proposed(drafter, 2) == [[6, 7], [6, 7]]
    assert drafter.look_up([[6, 8], []]) == [[], []]
    drafter.look_up([[6], []])
    assert proposed(drafter, 2) == [[8, 6], []]


def test_selected_rows_read_their_new_tokens():
    drafter = SuffixDrafter(SuffixSettings(10, num_pads=[2, 1, 0, 0]))
    drafter.rows([2, 1, 0])  # allowed even before the first call
    drafter.begin(torch.tensor([[1, 2, 3], [0, 4, 5], [0, 0, 6]]))
    drafter.look_up([[1], [4], [7]])
    assert proposed(drafter, 3) == [[2, 3, 1], [5, 4, 5], []]
    drafter.look_up([[2, 9, 1], [8], [6]])
    assert proposed(drafter, 3) == [[2, 9, 1], [], [7, 6, 7]]
    drafter.rows([2, 0])
    drafter.look_up([[7, 5], [9]])
    assert proposed(drafter, 3) == [[], [1, 9, 1]]


LOOKUP = {"prompt_lookup_num_tokens": 5, "num_assistant_tokens_schedule": "constant"}
NUM_NEW = 40


def few_words(batch_size, seed=1):
    """Make prompts from five words, most of which end in a repetition."""
    return ragged_prompts(batch_size, seed=seed, vocab_size=6, max_len=14)


@pytest.mark.fallback("prompt lookup alone")
def test_lookup_drafts_alone_beside_a_draft_of_target_size():
    options = {
        "max_new_tokens": NUM_NEW,
        "prompt_lookup_num_tokens": 5,
        "num_assistant_tokens": None,
    }
    stats = assert_decodes_as_plain(*pair("llama"), few_words(3), **options)
    assert 0 < max(stats.rounds_by_draft_len) <= 5
    assert any("as large as its target" in reason for reason in stats.fallbacks)


def test_config_fields_apply_and_configs_stay_unchanged():
    target, stats = enable(make_model("llama")), SpeculationStats()
    config = GenerationConfig(max_new_tokens=9, pad_token_id=0, prompt_lookup_num_tokens=4)
    config.suffix_store = SuffixStore()
    before = config.to_dict()
    # transformers' prompt lookup does not support these options
    many = {"num_return_sequences": 2, "do_sample": True, "seed": 1}
    target.generate(**few_words(1), generation_config=config, **many, speculation_stats=stats)
    assert 0 < max(stats.rounds_by_draft_len) <= 4
    assert config.to_dict() == before
    assert config.suffix_store.num_tokens > 0
    target.generation_config = config
    for draft_options, is_used in (
        ({}, True),
        ({"prompt_lookup_num_tokens": None, "suffix_store": None}, False),
    ):
        target.generate(**few_words(1), **draft_options, speculation_stats=stats)
        assert (stats.num_batch_rounds > 0) == is_used


def test_ngram_length_changes_the_drafts():
    target, _ = pair("llama")
    drafted = []
    for max_size in (1, None):
        stats = SpeculationStats()
        target.generate(
            **few_words(1),
            max_new_tokens=NUM_NEW,
            max_matching_ngram_size=max_size,
            speculation_stats=stats,
            **LOOKUP,
        )
        drafted.append((stats.num_batch_rounds, stats.num_accepted))
    assert drafted[0] != drafted[1]
