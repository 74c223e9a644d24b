"""The store of earlier texts: what it finds, its bound, and that threads may share it."""

import random
import tracemalloc

import pytest

from hf_speculate.draft.suffix_index import SuffixIndex
from hf_speculate.draft.suffix_store import MIN_BYTES, SuffixStore


def found(store: SuffixStore, token_ids: list[int], num: int = 5, most: int = 64):
    reader = store.reader(most)
    reader.follow(token_ids)
    return tuple(reader.find(num))


def test_it_finds_what_followed_the_longest_match():
    store = SuffixStore()
    store.add([1, 2, 3, 4, 5])
    store.add([7, 2, 3, 8])
    assert found(store, [9, 1, 2, 3]) == (3, [4, 5])
    assert found(store, [9, 2, 3]) == (2, [8])  # the later text's
    assert found(store, [9]) == (0, [])
    assert found(store, [5]) == (1, [])  # a text's end
    assert found(store, [1, 2, 3], most=2) == (2, [8])
    assert store.num_tokens == 9


def test_a_texts_end_yields_to_what_goes_on_in_the_older_half():
    store = SuffixStore()
    store.add([2, 3, 4])
    store._older, store._newer = store._newer, SuffixIndex()  # as when the bound is near
    store.add([1, 2, 3])
    assert found(store, [1, 2, 3]) == (2, [4])
    assert found(store, [4]) == (1, [])


def test_resetting_forgets_but_not_for_readers_under_way():
    store = SuffixStore()
    store.add([1, 2, 3])
    reader = store.reader(64)
    store.reset()
    assert store.num_tokens == 0
    assert found(store, [1, 2]) == (0, [])
    reader.follow([1])
    assert reader.find(2).token_ids == [2, 3]


@pytest.mark.parametrize("vocab_size", [3, 50_000])
def test_memory_stays_within_the_bound(vocab_size):
    """One word in three, or words that hardly ever come twice: few states with many transitions, or many."""
    generator = random.Random(0)
    tracemalloc.start()
    try:
        store = SuffixStore(MIN_BYTES)
        for _ in range(20):
            store.add([generator.randrange(vocab_size) for _ in range(700)])
            assert store.num_bytes <= MIN_BYTES
        assert tracemalloc.get_traced_memory()[0] <= MIN_BYTES
    finally:
        tracemalloc.stop()
    assert store.num_tokens < 20 * 700
    store.add([1, 2, 3, 4])
    assert found(store, [9, 1, 2, 3], num=1) == (3, [4])


def test_contexts_with_thousands_of_continuations_stay_within_it_too():
    """A new word before such a context splits the states of all its ends, and each copies what leads on from it."""
    store, largest = SuffixStore(16 << 20), 0
    for first in (1, 11, 21):
        context = list(range(first, first + 9))
        text = [
            token for word in range(3106) for token in (*context, 10_000 * first + word)
        ]  # nearly half of the bound
        ends = [token for length in range(8, 0, -1) for token in (500 + first, *context[-length:])]
        for added in (text, ends):
            store.add(added)
            largest = max(largest, store.num_bytes)
    assert MIN_BYTES < largest <= store.max_bytes


@pytest.mark.parametrize("at", [1, 4, 9])
def test_an_interrupt_while_a_text_is_added_leaves_a_store_that_works(monkeypatch, at):
    """Wherever the index stood, it is forgotten: readers under way go on with the older texts, later ones find new."""
    store = SuffixStore()
    text = [5, 6, 7, 5, 6, 8, 5, 7, 6, 5, 6, 7, 9]
    store.add([1, 2, 3])
    reader = store.reader(8)
    reader.follow([1, 2])
    split, calls = SuffixIndex._split, iter(range(1, 100))

    def interrupted(self, *args):
        if next(calls) == at:
            raise KeyboardInterrupt
        return split(self, *args)

    monkeypatch.setattr(SuffixIndex, "_split", interrupted)
    repeated = [token + 10 * turn for turn in range(4) for token in text]
    with pytest.raises(KeyboardInterrupt):
        store.add(repeated)
    assert reader.find(2).token_ids == []
    reader.follow([3, 4])
    assert store.num_tokens == 0
    monkeypatch.undo()
    store.add(text)
    later = store.reader(8)
    later.follow([5, 6, 7])
    assert later.find(2).token_ids == [9]
