"""Remembers texts of earlier calls, so that later ones can copy from them."""

import threading
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from hf_speculate.draft.suffix_index import EMPTY_MATCH, Match, SuffixIndex
from hf_speculate.errors import ConfigError
from hf_speculate.field_checks import is_int

MIN_BYTES = 1 << 20
_CHUNK_TOKENS = 256  # appended between two looks at the size
_TOKEN_BYTES = 1024  # more than one takes on average: two states, three transitions, each in a dict of its own


class Proposal(NamedTuple):
    """A possible continuation of a row."""

    match_len: int  # last tokens of the row that matched
    token_ids: list[int]  # what followed them


class SuffixStore:
    """Outputs of earlier calls, in bounded memory: `generate(..., prompt_lookup_num_tokens=10, suffix_store=store)`.

    Every call adds its rows' new tokens when it has ended well, and copies from what was there when it began. When the
    bound is near, the older half is forgotten. One store serves one tokenizer; threads may share it.

    Args:
        max_bytes: memory that it may take, at least 1 MiB.

    Raises:
        ConfigError: `max_bytes` is too small or no int.
    """

    def __init__(self, max_bytes: int = 64 << 20):
        if not is_int(max_bytes) or max_bytes < MIN_BYTES:
            raise ConfigError(f"max_bytes must be an int of at least {MIN_BYTES}, got {max_bytes!r}; leave it out")
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._newer, self._older = SuffixIndex(), SuffixIndex()

    @property
    def num_bytes(self) -> int:
        """Memory in use, as an estimate that is not below it."""
        with self._lock:
            return self._newer.num_bytes + self._older.num_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that can be found."""
        with self._lock:
            return self._newer.num_tokens + self._older.num_tokens

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember a text.

        Args:
            token_ids: its tokens.
        """
        checked = array("i", token_ids)
        with self._lock:
            try:
                self._append(checked)
            except BaseException:  # an interrupt may have left the index between two of its states
                self._newer.is_consistent = False
                self._newer = SuffixIndex()
                raise

    def reset(self) -> None:
        """Forget everything; calls under way go on with what they found."""
        with self._lock:
            self._newer, self._older = SuffixIndex(), SuffixIndex()

    def _append(self, token_ids: "array[int]") -> None:
        for begin in range(0, len(token_ids), _CHUNK_TOKENS):
            if self._newer.num_bytes + _CHUNK_TOKENS * _TOKEN_BYTES > self.max_bytes // 2:
                self._newer, self._older = SuffixIndex(), self._newer
            self._newer.extend(token_ids[begin : begin + _CHUNK_TOKENS])
            # A state that is split copies its transitions, of which a text may have thousands after one context.
            if self._newer.num_bytes + self._older.num_bytes > self.max_bytes:
                self._older = SuffixIndex()
                if self._newer.num_bytes > self.max_bytes:
                    self._newer = SuffixIndex()
        if len(token_ids):
            self._newer.separate()

    def reader(self, max_match_len: int) -> "StoreReader":
        """Follows one row through what is stored now; longer matches count as of `max_match_len` tokens."""
        with self._lock:
            return StoreReader(self._lock, [self._newer, self._older], max_match_len)


class StoreReader:
    """Where one row's end stands in a store."""

    def __init__(self, lock: threading.Lock, indices: list[SuffixIndex], max_match_len: int):
        self._lock = lock
        self._max_match_len = max_match_len
        self._found = [(index, EMPTY_MATCH) for index in indices]  # where the row's end stands in each

    def follow(self, token_ids: Sequence[int]) -> None:
        with self._lock:
            self._found = [(index, index.advance(place, token_ids)) for index, place in self._whole()]

    def find(self, num: int) -> Proposal:
        """The `num` tokens, or fewer, that followed the longest match; the newer text's where two are as long.

        What was found at a text's end yields to a shorter match elsewhere that something followed.
        """
        with self._lock:
            longest = 0
            for index, place in sorted(self._whole(), key=lambda pair: -pair[1].length):
                length = min(place.length, self._max_match_len)
                longest = max(longest, length)
                end = index.end_of(place._replace(length=length))
                token_ids = index.continuation(end, num, is_repeated=False) if length else []
                if token_ids:
                    return Proposal(length, token_ids)
            return Proposal(longest, [])

    def _whole(self) -> list[tuple[SuffixIndex, Match]]:
        """The indices that nobody was interrupted in growing, with the row's places."""
        return [(index, place) for index, place in self._found if index.is_consistent]
