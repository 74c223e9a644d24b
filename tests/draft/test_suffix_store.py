"""The store of earlier texts: what it finds, its bound, and an interrupt."""

import random
import tracemalloc
from array import array

import pytest

from hf_speculate.draft.suffix_index import SuffixIndex
from hf_speculate.draft.suffix_store import MIN_BYTES, SuffixStore


def found(store: SuffixStore, token_ids: list[int], num: int = 5):
    return tuple(store.find(array("i", token_ids), num))


def test_it_finds_what_followed_the_longest_match():
    store = SuffixStore()
    store.add([1, 2, 3, 4, 5])
    store.add([7, 2, 3, 8])
    assert found(store, [9, 1, 2, 3]) == (3, [4, 5])
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
    store.add([1, 2, 3, 4])
    assert found(store, [9, 1, 2, 3], num=1) == (3, [4])


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
