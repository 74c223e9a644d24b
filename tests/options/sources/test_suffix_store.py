"""The suffix store: texts of earlier calls, from which prompt lookup copies too."""

import random
import tracemalloc
from array import array

import pytest

from hf_speculate.draft.suffix_index import SuffixIndex
from hf_speculate.options.sources.suffix_store import MIN_BYTES, SuffixStore
from tests.cases import assert_decodes_as_plain, pair
from tests.draft.test_suffix import LOOKUP, NUM_NEW, draft_of, few_words
from tests.reliability.faults import Fault, FaultyStreamer
from tests.support.tiny import ragged_prompts


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


def test_the_store_is_copied_from_where_its_match_is_longer():
    store = SuffixStore()
    store.add([1, 2, 3, 4, 5])
    assert draft_of([[3, 9, 2, 3]], store=store) == [[4, 5]]
    assert draft_of([[2, 3, 9, 2, 3]], num=4, store=store) == [[9, 2, 3, 9]]  # as long here, and the row's own
    assert draft_of([[9, 2, 3]], store=store, vocab_size=5) == [[4]]
    assert draft_of([[3, 8, 2, 3]], num=3, store=store, vocab_size=4) == [
        [8, 2, 3]
    ]  # of the longer match nothing is known
    assert draft_of([[9, 2, 3]], store=store, eos_token_ids=frozenset([4])) == [[4]]


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
