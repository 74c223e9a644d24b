"""Suffix index: find earlier occurrences of the last tokens in a row or in earlier calls."""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

# Matches of this length or more count as equally long, and the latest one is used.
MAX_MATCH_LEN = 64
SEPARATOR = -1  # stands in for a token; no match or continuation crosses it
# Drafts after the longest of these matches get as many tokens accepted as drafts after the longest
# match of any length, measured on Python's standard library with the bundled tokenizer.
_NGRAM_LENS = (3, 1)
_MAX_CANDIDATES = 16  # number of occurrences of an n-gram to compare, latest first
_ENTRY_BYTES = 152  # maximum bytes of an entry in a large dict, including its n-gram and number
_TOKEN_BYTES = 16  # bytes of a token in three arrays that grow by an eighth
MAX_TOKEN_BYTES = _TOKEN_BYTES + len(_NGRAM_LENS) * _ENTRY_BYTES


class Match(NamedTuple):
    """An earlier occurrence of a sequence's last tokens."""

    length: int  # number of matching tokens; 0 without a match
    end: int  # number of tokens in the index up to the end of the occurrence


class Proposal(NamedTuple):
    """A possible continuation of a row."""

    match_len: int  # number of last tokens of the row that match
    token_ids: list[int]  # the tokens that follow the match


class TextStore(Protocol):
    """Sequences of earlier calls."""

    def of_prompt(self, token_ids: Sequence[int]) -> "TextStore":
        """Return the store with the sequences for a prompt."""

    def find(self, last: "array[int]", num: int) -> Proposal:
        """Return at most `num` tokens after the longest match of the tokens `last`."""


class _Chain(NamedTuple):
    """Occurrences of all n-grams of one length.

    An occurrence is stored as the number of tokens up to its end.
    """

    num: int  # n
    latest: dict[bytes, int]
    # by token: the previous occurrence of the n-gram that ends with this token; 0 if there is none
    before: "array[int]"


class SuffixIndex:
    """Hash chains over the n-grams of a growing sequence.

    LZ77 compressors use the same structure. Appending a token and searching take a bounded number
    of steps, regardless of the length of the sequence.
    """

    def __init__(self) -> None:
        self.token_ids = array("i")
        self._chains = [_Chain(num, {}, array("i")) for num in _NGRAM_LENS]

    @property
    def num_bytes(self) -> int:
        """Upper estimate of the memory in use, in bytes."""
        return (
            len(self.token_ids) * _TOKEN_BYTES
            + sum(len(chain.latest) for chain in self._chains) * _ENTRY_BYTES
        )

    def extend(self, token_ids: Iterable[int]) -> None:
        text = self.token_ids
        for token in token_ids:
            text.append(token)
            end = len(text)
            for ngram_len, latest, before in self._chains:
                ngram = text[max(end - ngram_len, 0) : end].tobytes()
                before.append(latest.get(ngram, 0))
                latest[ngram] = end

    def find(self, last: "array[int]") -> Match:
        """Find the longest earlier occurrence of the tokens `last` at the end of a sequence.

        At least one token follows the occurrence. If several are equally long, the latest is used.
        """
        text, max_len, length, match_end = self.token_ids, len(last), 0, 0
        for num, latest, before in self._chains:
            end = latest.get(last[-num:].tobytes(), 0) if num <= max_len else 0
            for _ in range(_MAX_CANDIDATES):
                if not end or length == max_len:
                    break
                # The next token of a longer match is compared first, where most occurrences fail.
                is_longer = length < end < len(text) and text[end - 1 - length] == last[-1 - length]
                if is_longer and text[end] != SEPARATOR:
                    matched = _match_len(text, end, last[-max_len:])
                    if matched > length:
                        length, match_end = matched, end
                end = before[end - 1]
            if length:
                break
            max_len = min(max_len, num - 1)  # a longer match would have been found
        return Match(length, match_end)

    def continuation(self, end: int, num: int) -> list[int]:
        """Return up to `num` tokens after the first `end` tokens, stopping at a separator."""
        token_ids = self.token_ids[end : end + num].tolist()
        return token_ids[: token_ids.index(SEPARATOR)] if SEPARATOR in token_ids else token_ids


def _match_len(text: Sequence[int], end: int, last: Sequence[int]) -> int:
    """Count how many tokens before `end` are equal to the tokens at the end of `last`."""
    length, max_len = 0, min(end, len(last))
    while length < max_len and text[end - 1 - length] == last[-1 - length]:
        length += 1
    return length
