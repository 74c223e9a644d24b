"""Streams the text of a generation in pieces that no later token changes."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_PARTIAL_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what decode() makes of bytes that are not a whole character


class TextStream:
    """Gives text as soon as it is final: whole characters, and no beginning of a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str]):
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        self.is_cut = False  # whether the text ended before a stop string
        self._ids: list[int] = []
        self._begin = self._read = 0  # the tokens in between are decoded again: a first token may lose its space
        self._pending = ""

    def read(self, token_ids: Sequence[int], is_end: bool = False) -> str:
        """The text that is final with these tokens, all so far; at the end all of the rest."""
        if len(token_ids) <= len(self._ids) and not is_end:
            return ""  # the row is decoded again
        self._ids = list(token_ids)
        before = self._decode(self._ids[self._begin : self._read])
        now = self._decode(self._ids[self._begin :])
        if now.endswith(_PARTIAL_CHARACTER) and not is_end:
            return ""
        self._begin, self._read = self._read, len(self._ids)
        self._pending += now[len(before) :]
        if self.is_cut:
            return ""
        ends = [at for stop in self.stop_strings if (at := self._pending.find(stop)) >= 0]
        self.is_cut = bool(ends)
        end = min(ends) if ends else len(self._pending) - (0 if is_end else self._num_pending())
        ready, self._pending = self._pending[:end], self._pending[end:]
        return ready

    def _num_pending(self) -> int:
        """Number of last characters that a stop string may begin with."""
        longest = max(map(len, self.stop_strings), default=1) - 1
        nums = range(min(longest, len(self._pending)), 0, -1)
        pending = self._pending
        return next((num for num in nums if any(stop.startswith(pending[-num:]) for stop in self.stop_strings)), 0)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
