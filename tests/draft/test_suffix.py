"""Prompt lookup: the suffix index, what is drafted, and the text of whole calls."""

import random
from array import array

import pytest
import torch
from transformers import GenerationConfig

from hf_speculate import SpeculationStats, enable
from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.suffix import RowText, SuffixDrafter, SuffixSettings
from hf_speculate.draft.suffix_index import MAX_MATCH_LEN, SEPARATOR, SuffixIndex
from hf_speculate.options.sources.suffix_store import SuffixStore
from hf_speculate.types import Kept, SampleStrategy
from tests.cases import assert_decodes_as_plain, each_value, pair
from tests.tiny import make_model, ragged_prompts

GREEDY = SampleStrategy.GREEDY


def latest_longest(text: list[int], last: list[int]) -> tuple[int, int]:
    """Length and end of the latest of the longest occurrences of the last tokens that a token follows."""
    for length in range(len(last), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == last[len(last) - length :] and text[end] != SEPARATOR:
                return length, end
    return 0, 0


@each_value(most=[1, 2, 5, MAX_MATCH_LEN], vocab_size=[1, 2, 3, 6])
def test_the_match_is_the_latest_of_the_longest(vocab_size, most):
    generator = random.Random(vocab_size)
    for _ in range(25):
        text, index = generator.choices(range(vocab_size), k=40), SuffixIndex()
        for num, token in enumerate(text, 1):
            index.extend([token])
            last = text[max(num - most, 0) : num]
            assert index.find(array("i", last)) == latest_longest(text[:num], last)


def test_the_last_tokens_of_another_text_are_found_within_one_sequence():
    generator = random.Random(1)
    for _ in range(50):
        text, last = generator.choices([SEPARATOR, 0, 1, 2], k=40), generator.choices(range(4), k=5)
        index = SuffixIndex()
        index.extend(text)
        assert index.find(array("i", last)) == latest_longest(text, last)


def draft_of(texts, num=10, num_pads=None, **settings):
    """The drafts of equally long texts, as lists of the tokens that count."""
    drafter = SuffixDrafter(SuffixSettings(**{"max_draft_tokens": 10, "num_pads": num_pads, **settings}))
    return counted(drafter.draft(DraftRequest(torch.tensor(texts), None, num, GREEDY)))


def counted(draft):
    return [ids[:num] for ids, num in zip(draft.token_ids.tolist(), draft.lens.tolist(), strict=True)]


def test_a_longer_match_is_copied_further_and_a_row_without_a_match_drafts_nothing():
    assert draft_of([[1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 7, 2, 3]]) == [[5, 8, 3, 6]]
    assert draft_of([[1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 7, 2, 3]], max_match_len=1) == [[6, 7, 2]]
    assert draft_of([[1, 2, 3, 4], [5, 6, 7, 5]]) == [[], [6, 7, 5]]
    text = [*range(1, 30)]
    lens = [len(draft_of([text + text[20 - num : 20]], num=99, max_draft_tokens=9)[0]) for num in range(6)]
    assert lens == [0, 3, 4, 4, 6, 6]


def test_a_row_drafts_as_far_as_its_matches_were_right():
    drafter = SuffixDrafter(SuffixSettings(10))
    period, queries = [1, 2, 3, 4, 5], []

    def drafted(*rows):
        kept = Kept(torch.tensor(rows), torch.tensor([len(row) for row in rows], dtype=torch.int32))
        request = DraftRequest(torch.tensor(rows), None, 10, GREEDY, kept=kept if queries else None)
        queries.append(request)
        return [len(ids) for ids in counted(drafter.draft(request))]

    # The first row goes on with its period; in the second one what follows the token 1 is always another token.
    assert drafted(period + period[:1], [9, 1, 8, 7, 6, 1]) == [3, 3]
    lens = [drafted([period[(number + 1) % 5]], [20 + number // 2 if number % 2 == 0 else 1]) for number in range(40)]
    copied, others = ([pair[row] for pair in lens] for row in range(2))
    assert copied[-1] == 10
    assert others[-1] == 0
    drafter.rows([1])
    assert drafted([1]) == [0]  # the rates are the row's own


def test_a_row_that_drafts_nothing_still_learns_what_it_would_have_drafted():
    row = RowText()
    row.rates.observe([0] * 30, 0)  # 30 tokens after a match of one token, none of them right
    drafter = SuffixDrafter(SuffixSettings(10))
    row.extend([1, 2, 3, 1])
    assert drafter.propose(row, 10) == (1, [])
    for number in range(200):
        row.extend([2, 9 + number, 1])
        drafter.propose(row, 10)
    assert drafter.propose(row, 10).token_ids[:1] == [2]


def test_padding_is_not_text():
    assert draft_of([[0, 0, 0, 5], [0, 7, 8, 0]], num_pads=[3, 1]) == [[], []]
    assert draft_of([[0, 0, 0, 5], [0, 7, 8, 0]]) == [[], [7, 8, 0]]


def test_nothing_is_copied_past_an_end_of_text():
    text = [1, 2, 3, 4, 5, 1, 2]
    assert draft_of([text], eos_token_ids=frozenset([4, 60])) == [[3, 4]]
    assert draft_of([text], eos_token_ids=frozenset([9])) == [[3, 4, 5, 1]]


def test_a_row_that_gained_nothing_has_ended():
    drafter = SuffixDrafter(SuffixSettings(10))
    request = DraftRequest(torch.tensor([[5, 6, 7, 5], [5, 6, 7, 5]]), None, 2, GREEDY)
    assert counted(drafter.draft(request)) == [[6, 7], [6, 7]]
    kept = Kept(torch.tensor([[6, 8], [-1, -1]]), torch.tensor([2, 0], dtype=torch.int32))
    assert counted(drafter.draft(request._replace(kept=kept))) == [[], []]
    kept = Kept(torch.tensor([[6], [-1]]), torch.tensor([1, 0], dtype=torch.int32))
    assert counted(drafter.draft(request._replace(kept=kept))) == [[8, 6], []]


def test_rows_that_stay_read_what_they_gained():
    drafter = SuffixDrafter(SuffixSettings(10, num_pads=[2, 1, 0, 0]))
    drafter.rows([2, 1, 0])  # before the first call, too
    request = DraftRequest(torch.tensor([[1, 2, 3, 1], [0, 4, 5, 4], [0, 0, 6, 7]]), None, 3, GREEDY)
    assert counted(drafter.draft(request)) == [[2, 3, 1], [5, 4, 5], []]
    kept = Kept(torch.tensor([[2, 9, 1], [8, -1, -1], [6, -1, -1]]), torch.tensor([3, 1, 1], dtype=torch.int32))
    assert counted(drafter.draft(request._replace(kept=kept))) == [[2, 9], [], [7, 6, 7]]  # 3 did not follow 2
    drafter.rows([2, 0])
    kept = Kept(torch.tensor([[7, 5], [9, -1]]), torch.tensor([2, 1], dtype=torch.int32))
    assert counted(drafter.draft(request._replace(kept=kept))) == [[], [1, 9]]


LOOKUP = {"prompt_lookup_num_tokens": 5, "num_assistant_tokens_schedule": "constant"}
NUM_NEW = 40


def few_words(batch_size, seed=1):
    """Prompts of five words, whose ends mostly stood before."""
    return ragged_prompts(batch_size, seed=seed, vocab_size=6, max_len=14)


@pytest.mark.fallback("prompt lookup alone")
def test_lookup_drafts_alone_beside_a_draft_as_large_as_its_target():
    options = {"max_new_tokens": NUM_NEW, "prompt_lookup_num_tokens": 5, "num_assistant_tokens": None}
    stats = assert_decodes_as_plain(*pair("llama"), few_words(3), **options)
    assert 0 < max(stats.rounds_by_draft_len) <= 5
    assert any("as large as its target" in reason for reason in stats.fallbacks)


def test_fields_of_configs_count_and_configs_stay_as_they_are():
    target, stats = enable(make_model("llama")), SpeculationStats()
    config = GenerationConfig(max_new_tokens=9, pad_token_id=0, prompt_lookup_num_tokens=4)
    config.suffix_store = SuffixStore()
    before = config.to_dict()
    many = {"num_return_sequences": 2, "do_sample": True, "seed": 1}  # which transformers' prompt lookup would not take
    target.generate(**few_words(1), generation_config=config, **many, speculation_stats=stats)
    assert 0 < max(stats.rounds_by_draft_len) <= 4
    assert config.to_dict() == before
    assert config.suffix_store.num_tokens > 0
    target.generation_config = config
    for own, is_used in (({}, True), ({"prompt_lookup_num_tokens": None, "suffix_store": None}, False)):
        target.generate(**few_words(1), **own, speculation_stats=stats)
        assert (stats.num_batch_rounds > 0) == is_used


def test_a_shorter_ngram_copies_otherwise():
    target, _ = pair("llama")
    drafted = []
    for most in (1, None):
        stats = SpeculationStats()
        target.generate(
            **few_words(1), max_new_tokens=NUM_NEW, max_matching_ngram_size=most, speculation_stats=stats, **LOOKUP
        )
        drafted.append(max(stats.rounds_by_draft_len))
    assert drafted == [3, 5]  # a match of one token is continued by three at first
