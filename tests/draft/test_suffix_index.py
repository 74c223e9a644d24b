"""The suffix index against its definition."""

import random

import pytest

from hf_speculate.draft.suffix_index import EMPTY_MATCH, MAX_MATCH_LEN, SuffixIndex
from tests.cases import each_value

MAX_GROWTH = 2.0  # of the steps of a round, from short to long


def latest_longest(text: list[int], end: list[int], most: int, last: int) -> tuple[int, int]:
    """Length and place of the longest suffix of `end` that ends in `text` at `last` tokens or before, by trying all."""
    for length in range(min(most, len(end)), 0, -1):
        for place in range(last, length - 1, -1):
            if text[place - length : place] == end[len(end) - length :]:
                return length, place
    return 0, 0


def markov_text(length: int, seed: int = 0) -> list[int]:
    """Text of 5000 words that often repeats its phrases, and more the longer it is, as texts do."""
    generator = random.Random(seed)
    text = [generator.randrange(5000) for _ in range(64)]
    while len(text) < length:
        if generator.random() < 0.5:
            start = generator.randrange(len(text) - 20)
            text += text[start : start + generator.randrange(2, 20)]
        text += [min(int(generator.expovariate(0.002)), 4999) for _ in range(generator.randrange(1, 4))]
    return text[:length]


@each_value(most=[1, 2, 5, MAX_MATCH_LEN], vocab_size=[1, 2, 3, 6])
def test_the_match_is_the_latest_of_the_longest(vocab_size, most):
    generator = random.Random(vocab_size)
    for _ in range(25):
        text = [generator.randrange(vocab_size) for _ in range(generator.randint(1, 60))]
        index = SuffixIndex(most)
        for place, token in enumerate(text):
            index.extend([token])
            expected = latest_longest(text, text[: place + 1], most, last=place)
            assert index.match_len == expected[0]
            assert not expected[0] or index.match_end == expected[1]


@pytest.mark.parametrize("most", [2, MAX_MATCH_LEN])
def test_another_text_is_followed_to_its_latest_longest_match(most):
    generator = random.Random(1)
    for _ in range(50):
        text = [generator.randrange(3) for _ in range(40)]
        other = [generator.randrange(4) for _ in range(30)]
        index = SuffixIndex(most)
        index.extend(text)
        place = EMPTY_MATCH
        for number, token in enumerate(other):
            place = index.advance(place, [token])
            expected = latest_longest(text, other[: number + 1], most, last=len(text))
            assert place.length == expected[0]
            assert not place.length or index.end_of(place) == expected[1]


def test_a_followed_text_is_still_found_after_the_index_has_grown():
    generator = random.Random(2)
    for _ in range(50):
        text = [generator.randrange(3) for _ in range(60)]
        other = [generator.randrange(3) for _ in range(30)]
        index = SuffixIndex()
        place = EMPTY_MATCH
        for number, token in enumerate(other):
            index.extend(text[2 * number : 2 * number + 2])  # which may split the state that was reached
            held = text[: 2 * number + 2]
            place = index.advance(place, [token])
            end = index.end_of(place)
            assert held[end - place.length : end] == other[number + 1 - place.length : number + 1]
            assert bool(place.length) == (token in held)


def test_a_text_that_repeats_itself_goes_on_with_its_period():
    index = SuffixIndex()
    index.extend([9, 1, 2, 3, 1, 2, 3, 1])
    assert (index.match_len, index.match_end) == (4, 5)
    assert index.continuation(index.match_end, 7) == [2, 3, 1, 2, 3, 1, 2]
    assert index.continuation(index.match_end, 7, is_repeated=False) == [2, 3, 1]


def test_no_match_and_no_continuation_cross_a_separator():
    index = SuffixIndex()
    index.extend([1, 2, 3])
    index.separate()
    assert index.match_len == 0
    index.extend([3])
    assert (index.match_len, index.match_end) == (1, 3)
    assert index.continuation(3, 5) == []
    assert index.continuation(1, 5) == [2, 3]
    index.separate()
    assert index.match_len == 0
    assert index.num_tokens == 4


def test_a_copy_grows_by_itself():
    index = SuffixIndex()
    index.extend([1, 2, 3, 1, 4, 2])
    twin = index.copy()
    twin.extend([3, 1])
    assert (twin.match_len, twin.match_end) == (3, 4)
    for one in (twin, index):
        one.extend([5])
        assert one.match_len == 0  # new to each
    index.extend([1, 2])
    assert (index.match_len, index.match_end) == (2, 2)
