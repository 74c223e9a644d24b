"""Suffix store: the outputs of earlier calls, which prompt lookup searches too."""

import threading
from array import array
from collections.abc import Sequence
from typing import Any

from hf_speculate.draft.suffix_index import MAX_TOKEN_BYTES, SEPARATOR, Proposal, SuffixIndex
from hf_speculate.errors import ConfigError
from hf_speculate.field_checks import is_int

MIN_BYTES = 1 << 20
_CHUNK_TOKENS = 256  # appended between two looks at the size


class SuffixStore:
    """Outputs of earlier calls, in bounded memory: `generate(..., prompt_lookup_num_tokens=10, suffix_store=store)`.

    Every call that ends without an error adds the new tokens of its rows. When the bound is near, the older half is
    dropped. One store serves one tokenizer; threads may share it.

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

    def __deepcopy__(self, memo: dict[int, Any]) -> "SuffixStore":
        """Return the object itself, since `generate` copies a `GenerationConfig` in every call."""
        return self

    @property
    def num_bytes(self) -> int:
        """Memory in use, as an estimate that is not below it."""
        with self._lock:
            return self._newer.num_bytes + self._older.num_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that can be found."""
        with self._lock:
            return sum(len(index.token_ids) - index.token_ids.count(SEPARATOR) for index in (self._newer, self._older))

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember a sequence of tokens."""
        text = array("i", [*token_ids, SEPARATOR])
        with self._lock:
            for begin in range(0, len(text), _CHUNK_TOKENS):
                if self._newer.num_bytes + _CHUNK_TOKENS * MAX_TOKEN_BYTES > self.max_bytes // 2:
                    self._newer, self._older = SuffixIndex(), self._newer
                # An interrupt leaves an index between two states, which must not be searched.
                growing, self._newer = self._newer, SuffixIndex()
                growing.extend(text[begin : begin + _CHUNK_TOKENS])
                self._newer = growing

    def reset(self) -> None:
        """Forget all sequences."""
        with self._lock:
            self._newer, self._older = SuffixIndex(), SuffixIndex()

    def find(self, last: "array[int]", num: int) -> Proposal:
        """At most `num` tokens that followed the longest match of the `last` ones; the newer of two as long."""
        with self._lock:
            matches = [(index.find(last), index) for index in (self._newer, self._older)]
            match, index = max(matches, key=lambda pair: pair[0].length)
            return Proposal(match.length, index.continuation(match.end, num) if match.length else [])
