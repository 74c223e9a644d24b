"""Prompt lookup: the suffix index against its definition, the store of earlier texts, and what is drafted."""

import random
import tracemalloc
from array import array

import pytest
import torch

from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings
from hf_speculate.draft.suffix_index import MAX_MATCH_LEN, MIN_BYTES, SEPARATOR, SuffixIndex, SuffixStore
from hf_speculate.types import Kept, SampleStrategy
from tests.cases import each_value

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
