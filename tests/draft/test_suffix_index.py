"""The suffix index against its definition."""

import random
from array import array

import pytest

from hf_speculate.draft.suffix_index import MAX_MATCH_LEN, SEPARATOR, SuffixIndex
from tests.cases import each_value


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
        text = [generator.randrange(vocab_size) for _ in range(generator.randint(1, 40))]
        index = SuffixIndex()
        for num, token in enumerate(text, 1):
            index.extend([token])
            last = text[max(num - most, 0) : num]
            assert index.find(array("i", last)) == latest_longest(text[:num], last)


def test_the_last_tokens_of_another_text_are_found_within_one_sequence():
    generator = random.Random(1)
    for _ in range(50):
        text = [generator.choice([SEPARATOR, 0, 1, 2]) for _ in range(40)]
        last = [generator.randrange(4) for _ in range(5)]
        index = SuffixIndex()
        index.extend(text)
        assert index.find(array("i", last)) == latest_longest(text, last)


@pytest.mark.parametrize(("end", "num", "expected"), [(1, 5, [2, 3]), (1, 1, [2]), (3, 5, []), (4, 5, [4])])
def test_a_continuation_ends_at_a_separator(end, num, expected):
    index = SuffixIndex()
    index.extend([1, 2, 3, SEPARATOR, 4])
    assert index.continuation(end, num) == expected
