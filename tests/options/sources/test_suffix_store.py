"""Test that prompt lookup with the suffix store also copies from texts of earlier calls."""

import random
import tracemalloc
from array import array

import pytest
import torch
from safetensors.torch import save_file

import hf_speculate
from hf_speculate.draft.suffix_index import SuffixIndex
from hf_speculate.errors import ConfigError
from hf_speculate.options.sources.suffix_store import MIN_BYTES, SuffixStore
from tests.cases import assert_decodes_as_plain, pair
from tests.draft.test_suffix import LOOKUP, NUM_NEW, draft_of, few_words
from tests.reliability.faults import Fault, FaultyStreamer
from tests.support.tiny import ragged_prompts
from tests.support.tiny_tokenizers import letters_tokenizer


def found(store: SuffixStore, token_ids: list[int], num: int = 5):
    return tuple(store.find(array("i", token_ids), num))


def test_proposal_follows_the_longest_match_in_the_store():
    store = SuffixStore()
    store.add([1, 2, 3, 4, 5])
    store.add([7, 2, 3, 8])
    assert found(store, [9, 1, 2, 3]) == (3, [4, 5])
    assert found(store, [9, 1, 2, 3], num=1) == (3, [4])
    assert found(store, [9, 2, 3]) == (2, [8])  # from the later text
    assert found(store, [9]) == found(store, [5]) == (0, [])
    assert store.num_tokens == 9
    memory = store._memory
    # as if close to the memory limit
    memory.older, memory.newer = memory.newer, type(memory.newer)()
    store.add([6, 1, 2, 3])
    assert found(store, [6, 1, 2, 3]) == (3, [4, 5])  # nothing follows the longer match
    store.reset()
    assert store.num_tokens == 0
    assert found(store, [1, 2]) == (0, [])


@pytest.mark.parametrize("vocab_size", [3, 50_000])
def test_memory_stays_within_the_bound(vocab_size):
    """Add frequent n-grams, and n-grams that are hardly ever repeated."""
    generator = random.Random(0)
    tracemalloc.start()
    try:
        store = SuffixStore(MIN_BYTES)
        for _ in range(20):
            store.add([generator.randrange(vocab_size) for _ in range(3000)])
            assert (
                tracemalloc.get_traced_memory()[0]
                <= store.num_bytes + (64 << 10)
                <= MIN_BYTES + (64 << 10)
            )
    finally:
        tracemalloc.stop()
    assert store.num_tokens < 20 * 3000


def test_store_works_after_an_interrupted_addition():
    class Interrupted(SuffixIndex):
        def extend(self, token_ids):
            self.token_ids.append(7)
            raise KeyboardInterrupt

    store = SuffixStore()
    store.add([])
    store._memory.newer.by_key[None].index = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        store.add([5, 6, 7])
    assert store.num_tokens == 0
    store.add([5, 6, 7])
    assert found(store, [5, 6]) == (2, [7])


def test_keys_have_separate_outputs():
    store = SuffixStore(key=lambda ids: ids[0])
    store.of(5).add([1, 2, 3])
    store.of(6).add([1, 2, 4])
    assert [found(store.of(key), [1, 2]) for key in (5, 6, 7)] == [(2, [3]), (2, [4]), (0, [])]
    assert draft_of([[5, 9, 1, 2], [6, 9, 1, 2], [7, 9, 1, 2]], store=store) == [[3], [4], []]
    assert (store.num_tokens, store.of(5).of_prompt([6])._key) == (6, 5)
    store.of(5).reset()
    assert store.num_tokens == 3
    assert found(store.of(5), [1, 2]) == (0, [])
    store.reset()
    assert (store.num_tokens, store.num_bytes) == (0, 0)


def test_memory_of_keys_stays_within_the_bounds():
    generator = random.Random(0)
    tracemalloc.start()
    try:
        stores = SuffixStore(MIN_BYTES, key=tuple), SuffixStore(key=tuple, max_tokens=2000)
        for _ in range(600):
            prompt = [generator.randrange(50_000) for _ in range(40)]
            stores[0].add_output(
                prompt, [generator.randrange(50_000) for _ in range(generator.randrange(30))]
            )
        assert (
            tracemalloc.get_traced_memory()[0]
            <= stores[0].num_bytes + (64 << 10)
            <= MIN_BYTES + (64 << 10)
        )
    finally:
        tracemalloc.stop()
    for number in range(300):
        stores[1].of(number).add(range(number, number + 20))
        assert stores[1].num_tokens <= 2000
    assert found(stores[1].of(299), [299]) == (1, [300, 301, 302, 303, 304])
    assert stores[1].num_tokens >= 980


def test_rows_draft_from_the_outputs_of_their_prompt():
    inputs, store = ragged_prompts(3, seed=5), SuffixStore(key=tuple)
    options = {**LOOKUP, "max_new_tokens": NUM_NEW}
    plain = assert_decodes_as_plain(pair("llama")[0], None, inputs, **options)
    first = assert_decodes_as_plain(pair("llama")[0], None, inputs, suffix_store=store, **options)
    second = assert_decodes_as_plain(pair("llama")[0], None, inputs, suffix_store=store, **options)
    assert second.num_batch_rounds < 0.5 * first.num_batch_rounds == 0.5 * plain.num_batch_rounds
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
    assert set(store._memory.newer.by_key) == set(map(tuple, prompts))
    outputs = store.of_prompt(prompts[0])._memory.newer.by_key[tuple(prompts[0])].numbered()
    assert [ids[:-NUM_NEW] for _, ids in outputs] == [prompts[0][-8:]] * 2
    alone = {name: tensor[:1] for name, tensor in inputs.items()}
    draft_options = {"suffix_store": store.of("elsewhere"), **options}
    assert (
        assert_decodes_as_plain(pair("llama")[0], None, alone, **draft_options).num_batch_rounds
        > second.num_batch_rounds
    )


def test_keys_over_the_length_limit_are_refused():
    store = SuffixStore(MIN_BYTES, key=lambda ids: (tuple(ids), "end"))
    for number in range(20):
        store.add_output(range(1000 * number, 1000 * number + 3000), range(50))
        assert store.num_bytes <= MIN_BYTES
    assert 50 < store.num_tokens < 20 * 50  # some were dropped, but not all
    with pytest.raises(ConfigError, match="return a digest"):
        store.of_prompt(range(5000))


@pytest.mark.parametrize("key", [lambda ids: ids, lambda ids: 1 / 0])
def test_failing_key_ends_the_call_before_decoding(key):
    store, stats = SuffixStore(key=key), hf_speculate.SpeculationStats()
    with pytest.raises(ConfigError, match="key must return a hashable value"):
        pair("llama")[0].generate(
            **ragged_prompts(1, seed=5),
            **LOOKUP,
            suffix_store=store,
            max_new_tokens=3,
            speculation_stats=stats,
        )
    assert not stats.fallbacks


TOKENIZER = letters_tokenizer("abcdefghij", pad_token="a", eos_token="b")


def test_file_holds_outputs_and_keys_in_order(tmp_path):
    path, key = tmp_path / "store.safetensors", tuple
    store = SuffixStore(key=key, tokenizer=TOKENIZER)
    store.save(path)
    assert SuffixStore.load(path, TOKENIZER).num_tokens == 0
    store.of(None).add([9, 8, 7])
    for number in range(6):
        store.of((1, ("a", number % 2))).add([1, 2, number])
    store.of("text").add(list(range(300)))
    store.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    again = SuffixStore.load(path, TOKENIZER, key=key)
    assert again.num_tokens == store.num_tokens == 3 + 18 + 300
    for view, last in (
        (None, [9, 8]),
        ((1, ("a", 0)), [1, 2]),
        ((1, ("a", 1)), [1, 2]),
        ("text", [254, 255]),
    ):
        assert found(again.of(view), last) == found(store.of(view), last) != (0, [])
    again.save(path)
    assert SuffixStore.load(path, TOKENIZER).num_tokens == 321
    small = SuffixStore.load(path, TOKENIZER, max_tokens=1024)
    for _ in range(4):
        small.of("new").add([3] * 200)
    small.save(path)
    left = SuffixStore.load(path, TOKENIZER)
    assert found(left.of((1, ("a", 0))), [1, 2]) == (0, [])  # the oldest were dropped
    assert found(left.of("new"), [3, 3])[0] == 2


def test_file_of_another_tokenizer_or_format_is_refused(tmp_path):
    path = tmp_path / "store.safetensors"
    store = SuffixStore(tokenizer=TOKENIZER)
    store.add([1, 2])
    store.save(path)
    other = letters_tokenizer("abcdefghik", pad_token="a", eos_token="b")
    with pytest.raises(
        ConfigError, match="must be of this tokenizer, got one of another vocabulary"
    ):
        SuffixStore.load(path, other)
    whole = path.read_bytes()
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    for content in (whole[:-3], b"", b"{}", (tmp_path / "other.safetensors").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"a suffix store must be in .*; choose another path"):
            SuffixStore.load(path, TOKENIZER)
    with pytest.raises(ConfigError, match="a suffix store must be in"):
        SuffixStore.load(tmp_path / "none", TOKENIZER)
    with pytest.raises(ConfigError, match="tokenizer must be given to save a store"):
        SuffixStore().save(path)
    store.of(2.5).add([1])
    with pytest.raises(
        ConfigError, match="keys must be strings, integers or tuples of them to be saved, got float"
    ):
        store.save(path)


@pytest.mark.parametrize("wrong", [{"max_bytes": 1}, {"max_tokens": 5}, {"key": "a"}])
def test_invalid_store_arguments_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        SuffixStore(**wrong)


def test_longer_match_in_the_store_is_preferred():
    store = SuffixStore()
    store.add([1, 2, 3, 4, 5])
    assert draft_of([[3, 9, 2, 3]], store=store) == [[4, 5]]
    # The match in the row is equally long and is preferred.
    assert draft_of([[2, 3, 9, 2, 3]], num=4, store=store) == [[9, 2, 3, 9]]
    assert draft_of([[9, 2, 3]], store=store, vocab_size=5) == [[4]]
    assert draft_of([[3, 8, 2, 3]], num=3, store=store, vocab_size=4) == [
        [8, 2, 3]
    ]  # nothing usable follows the longer match
    assert draft_of([[9, 2, 3]], store=store, eos_token_ids=frozenset([4])) == [[4]]


def test_store_keeps_texts_between_calls():
    inputs, store = ragged_prompts(2, seed=5), SuffixStore()
    options = {**LOOKUP, "suffix_store": store, "max_new_tokens": NUM_NEW}
    first = assert_decodes_as_plain(pair("llama")[0], None, inputs, **options)
    assert store.num_tokens == 2 * NUM_NEW
    second = assert_decodes_as_plain(pair("llama")[0], None, inputs, **options)
    assert second.num_batch_rounds < 0.5 * first.num_batch_rounds
    store.reset()
    again = assert_decodes_as_plain(pair("llama")[0], None, inputs, **options)
    assert again.num_batch_rounds == first.num_batch_rounds


def test_failed_call_adds_nothing_to_the_store():
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
