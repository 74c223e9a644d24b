"""Prompt lookup: the suffix index, the store of earlier texts, what is drafted, and the text of whole calls."""

import random
import tracemalloc
from array import array

import pytest
import torch
from transformers import GenerationConfig

from hf_speculate import SpeculationStats, enable
from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings
from hf_speculate.draft.suffix_index import MAX_MATCH_LEN, SEPARATOR, SuffixIndex
from hf_speculate.options.sources.suffix_store import MIN_BYTES, SuffixStore
from hf_speculate.types import Kept, SampleStrategy
from tests.cases import assert_decodes_as_plain, each_value, pair
from tests.reliability.faults import Fault, FaultyStreamer
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


def found(store: SuffixStore, token_ids: list[int], num: int = 5):
    return tuple(store.find(array("i", token_ids), num))


def test_the_store_finds_what_followed_the_longest_match_in_its_text():
    store = SuffixStore()
    store.add([1, 2, 3, 4, 5])
    store.add([7, 2, 3, 8])
    assert found(store, [9, 1, 2, 3]) == (3, [4, 5])
    assert found(store, [9, 1, 2, 3], num=1) == (3, [4])
    assert found(store, [9, 2, 3]) == (2, [8])  # the later text's
    assert found(store, [9]) == found(store, [5]) == (0, [])
    assert store.num_tokens == 9
    store._older, store._newer = store._newer, SuffixIndex()  # as when the bound is near
    store.add([6, 1, 2, 3])
    assert found(store, [6, 1, 2, 3]) == (3, [4, 5])  # nothing follows the longer match
    store.reset()
    assert store.num_tokens == 0
    assert found(store, [1, 2]) == (0, [])


@pytest.mark.parametrize("vocab_size", [3, 50_000])
def test_memory_stays_within_the_bound(vocab_size):
    """N-grams that often come again, and n-grams that hardly ever come twice."""
    generator = random.Random(0)
    tracemalloc.start()
    try:
        store = SuffixStore(MIN_BYTES)
        for _ in range(20):
            store.add([generator.randrange(vocab_size) for _ in range(3000)])
            assert tracemalloc.get_traced_memory()[0] <= store.num_bytes + (64 << 10) <= MIN_BYTES + (64 << 10)
    finally:
        tracemalloc.stop()
    assert store.num_tokens < 20 * 3000


def test_an_interrupt_while_a_text_is_added_leaves_a_store_that_works():
    class Interrupted(SuffixIndex):
        def extend(self, token_ids):
            self.token_ids.append(7)
            raise KeyboardInterrupt

    store = SuffixStore()
    store._newer = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        store.add([5, 6, 7])
    assert store.num_tokens == 0
    store.add([5, 6, 7])
    assert found(store, [5, 6]) == (2, [7])


def draft_of(texts, num=10, num_pads=None, **settings):
    """The drafts of equally long texts, as lists of the tokens that count."""
    drafter = SuffixDrafter(SuffixSettings(**{"max_draft_tokens": 10, "num_pads": num_pads, **settings}))
    return counted(drafter.draft(DraftRequest(torch.tensor(texts), None, num, GREEDY)))


def counted(draft):
    return [ids[:num] for ids, num in zip(draft.token_ids.tolist(), draft.lens.tolist(), strict=True)]


def test_a_longer_match_is_copied_further_and_a_row_without_a_match_drafts_nothing():
    assert draft_of([[1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 7, 2, 3]]) == [[5, 8, 3, 6, 7, 2]]
    assert draft_of([[1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 7, 2, 3]], max_match_len=1) == [[6, 7, 2, 3]]
    assert draft_of([[1, 2, 3, 4], [5, 6, 7, 5]]) == [[], [6, 7, 5, 6]]
    text = [*range(1, 30)]
    lens = [len(draft_of([text + text[20 - num : 20]], num=99, max_draft_tokens=9)[0]) for num in range(6)]
    assert lens == [0, 4, 6, 8, 9, 9]


def test_padding_is_not_text():
    assert draft_of([[0, 0, 0, 5], [0, 7, 8, 0]], num_pads=[3, 1]) == [[], []]
    assert draft_of([[0, 0, 0, 5], [0, 7, 8, 0]]) == [[], [7, 8, 0, 7]]


def test_nothing_is_copied_past_an_end_of_text():
    text = [1, 2, 3, 4, 5, 1, 2]
    assert draft_of([text], eos_token_ids=frozenset([4, 60])) == [[3, 4]]
    assert draft_of([text], eos_token_ids=frozenset([9])) == [[3, 4, 5, 1, 2, 3]]


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
    assert counted(drafter.draft(request._replace(kept=kept))) == [[2, 9, 1], [], [7, 6, 7]]
    drafter.rows([2, 0])
    kept = Kept(torch.tensor([[7, 5], [9, -1]]), torch.tensor([2, 1], dtype=torch.int32))
    assert counted(drafter.draft(request._replace(kept=kept))) == [[], [1, 9, 1]]


def test_the_store_is_copied_from_where_its_match_is_longer():
    store = SuffixStore()
    store.add([1, 2, 3, 4, 5])
    assert draft_of([[3, 9, 2, 3]], store=store) == [[4, 5]]
    assert draft_of([[2, 3, 9, 2, 3]], store=store) == [[9, 2, 3, 9, 2, 3]]  # as long here, and the row's own
    assert draft_of([[9, 2, 3]], store=store, vocab_size=5) == [[4]]
    assert draft_of([[3, 8, 2, 3]], store=store, vocab_size=4) == [[8, 2, 3, 8]]  # of the longer match nothing is known
    assert draft_of([[9, 2, 3]], store=store, eos_token_ids=frozenset([4])) == [[4]]


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
    assert drafted == [4, 5]  # a match of one token is continued by four at most


def test_a_store_carries_texts_from_call_to_call():
    inputs, store = ragged_prompts(2, seed=5), SuffixStore()
    options = {**LOOKUP, "suffix_store": store, "max_new_tokens": NUM_NEW}
    first = assert_decodes_as_plain(pair("llama")[0], None, inputs, **options)
    assert store.num_tokens == 2 * NUM_NEW
    second = assert_decodes_as_plain(pair("llama")[0], None, inputs, **options)
    assert second.num_batch_rounds < 0.5 * first.num_batch_rounds
    store.reset()
    again = assert_decodes_as_plain(pair("llama")[0], None, inputs, **options)
    assert again.num_batch_rounds == first.num_batch_rounds


def test_a_call_that_fails_adds_nothing_to_the_store():
    store = SuffixStore()
    with pytest.raises(RuntimeError, match="on purpose"):
        pair("llama")[0].generate(
            **few_words(1),
            streamer=FaultyStreamer(Fault(2, RuntimeError("on purpose")), "put"),
            suffix_store=store,
            max_new_tokens=8,
            **LOOKUP,
        )
    assert store.num_tokens == 0
