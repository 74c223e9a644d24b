"""Store outputs of earlier calls for prompt lookup."""

import copy
import math
import threading
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_speculate.draft.suffix_index import MAX_TOKEN_BYTES, SEPARATOR, Proposal, SuffixIndex
from hf_speculate.errors import ConfigError
from hf_speculate.field_checks import is_int
from hf_speculate.options.sources.store_file import StoredOutput, read_outputs, write_outputs

MIN_BYTES = 1 << 20
_CHUNK_TOKENS = 256  # tokens appended between two size checks
# number of last prompt tokens stored before an output, so that the output's beginning can match
_PROMPT_TOKENS = 8
_KEY_BYTES = 2048  # upper bound for the index of one key without its tokens, in bytes
_ID_BYTES = 40  # upper bound for an id in a key, in bytes
_OUTPUT_BYTES = 192  # upper bound for one output without its tokens, in bytes
PromptKey = Callable[[list[int]], Hashable]


def _bytes_of(key: Hashable) -> int:
    """Return an upper bound on the memory for a key with an empty index, in bytes."""
    return _KEY_BYTES + _ID_BYTES * _num_ids(key)


def _num_ids(key: Hashable) -> int:
    """Return the number of ids and characters in a key of strings, integers and tuples."""
    if isinstance(key, tuple):
        return sum(1 + _num_ids(part) for part in key)
    return len(key) if isinstance(key, str) else 0


class _Outputs:
    """Outputs under one key."""

    def __init__(self) -> None:
        self.index = SuffixIndex()
        # number of each output in the store, and its offset in the index
        self.begins: list[tuple[int, int]] = []
        self.num_tokens = 0

    def bytes_under(self, key: Hashable) -> int:
        """Return an upper bound on the memory that the outputs use under a key, in bytes."""
        return self.index.num_bytes + _bytes_of(key) + _OUTPUT_BYTES * len(self.begins)

    def extend(self, token_ids: "array[int]") -> None:
        self.index.extend(token_ids)
        self.num_tokens += len(token_ids) - token_ids.count(SEPARATOR)

    def numbered(self) -> Iterator[tuple[int, list[int]]]:
        """Iterate over the numbers and tokens of all outputs."""
        token_ids = self.index.token_ids
        ends = [begin for _, begin in self.begins[1:]] + [len(token_ids)]
        for (number, begin), end in zip(self.begins, ends, strict=True):
            yield number, [token for token in token_ids[begin:end] if token != SEPARATOR]


class _Generation:
    """Outputs that are dropped together."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, _Outputs] = {}
        self.num_bytes = self.num_tokens = 0

    def forget(self, key: Hashable) -> _Outputs:
        """Remove and return the outputs of a key; empty if there are none."""
        outputs = self.by_key.pop(key, None)
        if outputs is None:
            return _Outputs()
        self.num_bytes -= outputs.bytes_under(key)
        self.num_tokens -= outputs.num_tokens
        return outputs

    def put(self, key: Hashable, outputs: _Outputs) -> None:
        """Put back the removed outputs of a key."""
        self.by_key[key] = outputs
        self.num_bytes += outputs.bytes_under(key)
        self.num_tokens += outputs.num_tokens


class _Memory:
    """Memory shared by all views of a store."""

    def __init__(self, max_bytes: int, max_tokens: int | None):
        self.max_bytes, self.max_tokens = max_bytes, math.inf if max_tokens is None else max_tokens
        self.lock = threading.Lock()  # guards the fields below
        self.newer, self.older, self.num_added = _Generation(), _Generation(), 0

    def reset(self) -> None:
        self.newer, self.older = _Generation(), _Generation()

    def add(self, key: Hashable, token_ids: Sequence[int]) -> None:
        text, is_begin = array("i", [*token_ids, SEPARATOR]), True
        for begin in range(0, len(text), _CHUNK_TOKENS):
            chunk = text[begin : begin + _CHUNK_TOKENS]
            if self._is_full(len(chunk), 0 if key in self.newer.by_key else _bytes_of(key)):
                self.newer, self.older, is_begin = _Generation(), self.newer, True
            # Remove the outputs during the update: after an interrupt, their index is inconsistent
            # and must not be searched.
            outputs = self.newer.forget(key)
            if is_begin:
                outputs.begins.append((self.num_added, len(outputs.index.token_ids)))
                self.num_added, is_begin = self.num_added + 1, False
            outputs.extend(chunk)
            self.newer.put(key, outputs)

    def _is_full(self, num_tokens: int, key_bytes: int) -> bool:
        num_bytes = self.newer.num_bytes + num_tokens * MAX_TOKEN_BYTES + key_bytes
        return (
            num_bytes > self.max_bytes // 2
            or self.newer.num_tokens + num_tokens > self.max_tokens // 2
        )


class SuffixStore:
    """Outputs of earlier calls, in bounded memory.

    Use it as `generate(..., prompt_lookup_num_tokens=10, suffix_store=store)`. Every successful
    call adds the new tokens of its rows. Near a bound, the older half is dropped. A store
    serves one tokenizer; threads may share it.

    With `key`, a row only searches and extends the outputs under its own key, so the rollouts of a
    prompt draft from each other. `store.of(key)` uses one key for all prompts of a call.

    Args:
        max_bytes: maximum memory, at least 1 MiB.
        max_tokens: maximum number of tokens, at least 1,024.
            None for `max_bytes` as the only bound.
        key: a function from a prompt's list of token ids to a key, such as `tuple`. A key consists
            of strings, integers and tuples of them. None to use one key for all prompts.
        tokenizer: the tokenizer of the outputs; only `save` needs it.

    Raises:
        ConfigError: an argument has an invalid value.
    """

    def __init__(
        self,
        max_bytes: int = 64 << 20,
        *,
        max_tokens: int | None = None,
        key: PromptKey | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        if not is_int(max_bytes) or max_bytes < MIN_BYTES:
            raise ConfigError(
                f"max_bytes must be an int of at least {MIN_BYTES}, got {max_bytes!r}; leave it out"
            )
        if max_tokens is not None and (not is_int(max_tokens) or max_tokens < 4 * _CHUNK_TOKENS):
            raise ConfigError(
                f"max_tokens must be an int of at least {4 * _CHUNK_TOKENS}, got {max_tokens!r}; "
                "leave it out"
            )
        if key is not None and not callable(key):
            raise ConfigError(
                f"key must be a function of token ids, got {type(key).__name__}; use store.of(key)"
            )
        self.max_bytes, self.max_tokens, self.tokenizer = max_bytes, max_tokens, tokenizer
        self._key_of: PromptKey | None = key
        self._key: Hashable = None  # key for all prompts
        self._memory = _Memory(max_bytes, max_tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SuffixStore":
        """Return the object itself, because `generate` copies its `GenerationConfig`."""
        return self

    @classmethod
    def load(
        cls,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_bytes: int = 64 << 20,
        max_tokens: int | None = None,
        key: PromptKey | None = None,
    ) -> "SuffixStore":
        """Load a store written by `save`.

        Args:
            path: the file.
            tokenizer: the tokenizer of the store.
            max_bytes: as for a new store.
            max_tokens: as for a new store.
            key: the key function of the saved store.

        Returns:
            A store with the newest outputs within its bounds.

        Raises:
            ConfigError: the file holds no store, or a store of another tokenizer.
        """
        store = cls(max_bytes, max_tokens=max_tokens, key=key, tokenizer=tokenizer)
        for output in read_outputs(Path(path), tokenizer):
            store._memory.add(output.key, output.token_ids)
        return store

    @property
    def num_bytes(self) -> int:
        """Upper bound on the memory in use by all keys, in bytes."""
        with self._memory.lock:
            return self._memory.newer.num_bytes + self._memory.older.num_bytes

    @property
    def num_added(self) -> int:
        """Number of outputs ever added, over all keys."""
        return self._memory.num_added

    @property
    def num_tokens(self) -> int:
        """Number of searchable tokens, over all keys."""
        with self._memory.lock:
            return self._memory.newer.num_tokens + self._memory.older.num_tokens

    def of(self, key: Hashable) -> "SuffixStore":
        """Return a view of the outputs under one key that shares this store's memory.

        Args:
            key: a key of strings, integers and tuples of them.

        Raises:
            ConfigError: the key takes more than an eighth of the store's memory.
        """
        if _bytes_of(key) > self.max_bytes // 8:
            raise ConfigError(
                f"key must take at most {self.max_bytes // 8} bytes, an eighth of max_bytes, got "
                f"{_bytes_of(key)}; "
                "return a digest of the ids, or raise max_bytes"
            )
        view = copy.copy(self)
        view._key, view._key_of = key, None
        return view

    def of_prompt(self, token_ids: Sequence[int]) -> "SuffixStore":
        """Return the view for the row with this prompt.

        Raises:
            ConfigError: the key function fails, or returns a key that is too long or not hashable.
        """
        if self._key_of is None:
            return self
        try:
            key = self._key_of(list(token_ids))
            hash(key)
        except Exception as error:
            raise ConfigError(
                "key must return a hashable value for the ids of a prompt, got "
                f"{type(error).__name__}: {error}; "
                "return a number, a text or a tuple"
            ) from error
        return self.of(key)

    def add(self, token_ids: Sequence[int]) -> None:
        """Add a sequence of tokens."""
        with self._memory.lock:
            self._memory.add(self._key, token_ids)

    def add_output(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Add the output of a prompt; under a key, it follows the last tokens of the prompt."""
        store = self.of_prompt(prompt_ids)
        store.add(token_ids if store._key is None else [*prompt_ids[-_PROMPT_TOKENS:], *token_ids])

    def reset(self) -> None:
        """Remove all outputs, or in a view the outputs under its key."""
        with self._memory.lock:
            if self._key is None:
                self._memory.reset()
                return
            for generation in (self._memory.newer, self._memory.older):
                generation.forget(self._key)

    def save(self, path: str | Path) -> None:
        """Write all outputs to a safetensors file, atomically.

        Args:
            path: the file, in an existing folder.

        Raises:
            ConfigError: the store has no tokenizer, or a key cannot be written.
        """
        if self.tokenizer is None:
            raise ConfigError(
                "tokenizer must be given to save a store, got None; pass it to SuffixStore"
            )
        with self._memory.lock:
            numbered = [
                (number, StoredOutput(key, ids))
                for generation in (self._memory.older, self._memory.newer)
                for key, outputs in generation.by_key.items()
                for number, ids in outputs.numbered()
            ]
        write_outputs(
            Path(path), [output for _, output in sorted(numbered, key=_number_of)], self.tokenizer
        )

    def find(self, last: "array[int]", num: int) -> Proposal:
        """Return at most `num` tokens after the longest match of the `last` tokens.

        If two matches have equal length, the newer match wins.
        """
        memory = self._memory
        with memory.lock:
            proposal = Proposal(0, [])
            for outputs in (memory.newer.by_key.get(self._key), memory.older.by_key.get(self._key)):
                if (
                    outputs is not None
                    and (match := outputs.index.find(last)).length > proposal.match_len
                ):
                    proposal = Proposal(match.length, outputs.index.continuation(match.end, num))
            return proposal


def _number_of(pair: tuple[int, StoredOutput]) -> int:
    return pair[0]
