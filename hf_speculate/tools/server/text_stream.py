"""Streams the text of a generation in pieces that no later token changes."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_PARTIAL_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what decode() makes of bytes that are not a whole character
_MAX_HELD = 3  # tokens that a later one may still complete: a character has four bytes at most
# Special tokens that clients need as text: they mark tool calls and reasoning, and most tokenizers list them as text.
TAGS = {"<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]"}


class TextStream:
    """Gives text as soon as it is final: whole characters, and no beginning of a stop string.

    Stop strings are searched for in the text with its special tokens, as `StopStringCriteria` does. Special tokens are
    left out of the pieces, but for tags of tool calls and of reasoning, or with `shows_special`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str], shows_special: bool = False):
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        self._shows_special = shows_special
        self.is_cut = False  # whether the text ended before a stop string
        self._num_read = 0  # tokens of the row
        self._special_texts: dict[int, str] = {}  # by token id; empty for ordinary tokens
        self._is_empty = True  # whether no ordinary token has come
        self._ids: list[int] = []  # the latest ordinary tokens
        # those of them whose text is known; they are decoded again, as a first token loses its space
        self._num_given = 0
        self._pending = ""  # text that is not given, with special tokens
        self._hidden: list[tuple[int, int]] = []  # begin and end in the pending text of what is not given

    def read(self, token_ids: Sequence[int], is_end: bool = False) -> str:
        """The text that is final with these tokens, all so far; at the end all of the rest."""
        if len(token_ids) <= self._num_read and not is_end:
            return ""  # the row is decoded again
        for token_id in token_ids[self._num_read :]:
            if special_text := self._special_text(token_id):
                self._decode_characters()
                if special_text not in TAGS and not self._shows_special:
                    self._hidden.append((len(self._pending), len(self._pending) + len(special_text)))
                self._pending += special_text
            else:
                if self._is_empty:
                    self._add_lost_space(token_id)
                self._ids.append(token_id)
        self._num_read = max(self._num_read, len(token_ids))
        self._decode_characters(is_end)
        if self.is_cut:
            return ""
        ends = [at for stop in self.stop_strings if (at := self._pending.find(stop)) >= 0]
        self.is_cut = bool(ends)
        return self._take(min(ends) if ends else len(self._pending) - (0 if is_end else self._num_held()))

    @property
    def num_pending(self) -> int:
        """Number of characters that were read and not given, hidden ones left out."""
        return len(self._pending) - sum(end - begin for begin, end in self._hidden)

    @property
    def num_undecoded(self) -> int:
        """Number of last tokens that are no whole character yet."""
        return len(self._ids) - self._num_given

    def _decode_characters(self, is_end: bool = False) -> None:
        """Add the text of the tokens so far to the pending text, up to the last whole character unless `is_end`."""
        num = len(self._ids)
        first = num if is_end else max(num - _MAX_HELD, self._num_given)
        text = ""
        for end in range(num, first - 1, -1):
            text = self._decode(self._ids[:end])
            if is_end or not text.endswith(_PARTIAL_CHARACTER):
                break
        else:
            end = first  # no later token completes these bytes
        if end <= self._num_given:
            return
        self._pending += text[len(self._decode(self._ids[: self._num_given])) :]
        self._ids, self._num_given = self._ids[self._num_given :], end - self._num_given

    def _add_lost_space(self, first_id: int) -> None:
        """Add a hidden space if decoding takes it from the first token: a stop string may begin with it."""
        self._is_empty = False
        text = self._decode([first_id])
        if self._decode([first_id, first_id])[len(text) :] == f" {text}":
            self._hidden.append((len(self._pending), len(self._pending) + 1))
            self._pending += " "

    def _take(self, end: int) -> str:
        """Cut the pending text there; returns what stood before, without what is hidden."""
        pieces, begin = [], 0
        for hidden_begin, hidden_end in self._hidden:
            pieces.append(self._pending[begin : min(hidden_begin, end)])
            begin = min(hidden_end, end)
        pieces.append(self._pending[begin:end])
        self._pending = self._pending[end:]
        self._hidden = [(max(first - end, 0), last - end) for first, last in self._hidden if last > end]
        return "".join(pieces)

    def _num_held(self) -> int:
        """Number of last characters that a stop string may begin with."""
        longest = max(map(len, self.stop_strings), default=1) - 1
        nums = range(min(longest, len(self._pending)), 0, -1)
        pending = self._pending
        return next((num for num in nums if any(stop.startswith(pending[-num:]) for stop in self.stop_strings)), 0)

    def _special_text(self, token_id: int) -> str:
        """The text of a special token, which decoding can skip; empty for an ordinary token."""
        text = self._special_texts.get(token_id)
        if text is None:
            is_special = not self._decode([token_id])
            text = str(self.tokenizer.decode([token_id], skip_special_tokens=False)) if is_special else ""
            self._special_texts[token_id] = text
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
