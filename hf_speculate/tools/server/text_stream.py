"""Stream the text of a generation in final pieces: later tokens never change them."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_PARTIAL_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # decode() returns it for an incomplete character
_MAX_HELD = 3  # tokens of an incomplete character, which has at most four bytes
# Special tokens needed by clients: they mark tool calls and reasoning, and most tokenizers list them as text.
TAGS = {"<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]"}


class TextStream:
    """Stream of final text.

    Final text has whole characters, and its end begins no stop string. Stop strings are searched for in the text with
    its special tokens, like in `StopStringCriteria`. Special tokens are left out of the pieces, except for `TAGS`, or
    with `shows_special`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str], shows_special: bool = False):
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        self._shows_special = shows_special
        self.is_cut = False  # whether the text ended before a stop string
        self._num_read = 0  # tokens of the row
        self._special_texts: dict[int, str] = {}  # token id -> text; empty for ordinary tokens
        self._is_empty = True  # whether no ordinary token was read
        self._ids: list[int] = []  # the latest ordinary tokens
        # The first of these tokens are decoded already. They stay, because decoding drops a first token's space.
        self._num_decoded = 0
        self._pending = ""  # text to return later, with special tokens
        self._hidden: list[tuple[int, int]] = []  # begin and end of hidden spans in the pending text

    def read(self, token_ids: Sequence[int], is_end: bool = False) -> str:
        """Return the text that became final; at the end all remaining text.

        Args:
            token_ids: all tokens of the row so far.
            is_end: whether the row has ended.
        """
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
        ends = [index for stop in self.stop_strings if (index := self._pending.find(stop)) >= 0]
        self.is_cut = bool(ends)
        return self._take(min(ends) if ends else len(self._pending) - (0 if is_end else self._num_held()))

    @property
    def num_pending(self) -> int:
        """Number of characters to return later, without hidden ones."""
        return len(self._pending) - sum(end - begin for begin, end in self._hidden)

    @property
    def num_undecoded(self) -> int:
        """Number of last tokens in an incomplete character."""
        return len(self._ids) - self._num_decoded

    def _decode_characters(self, is_end: bool = False) -> None:
        """Move whole characters to the pending text; with `is_end` an incomplete one too."""
        num_ids = len(self._ids)
        first = num_ids if is_end else max(num_ids - _MAX_HELD, self._num_decoded)
        text = ""
        for end in range(num_ids, first - 1, -1):
            text = self._decode(self._ids[:end])
            if is_end or not text.endswith(_PARTIAL_CHARACTER):
                break
        else:
            end = first  # no later token completes these bytes
        if end <= self._num_decoded:
            return
        self._pending += text[len(self._decode(self._ids[: self._num_decoded])) :]
        self._ids, self._num_decoded = self._ids[self._num_decoded :], end - self._num_decoded

    def _add_lost_space(self, first_id: int) -> None:
        """Add the first token's space if decoding drops it: a stop string may begin with it.

        The space is hidden from the returned text.
        """
        self._is_empty = False
        text = self._decode([first_id])
        if self._decode([first_id, first_id])[len(text) :] == f" {text}":
            self._hidden.append((len(self._pending), len(self._pending) + 1))
            self._pending += " "

    def _take(self, end: int) -> str:
        """Cut the pending text at `end`, and return its first part without hidden spans."""
        pieces, begin = [], 0
        for hidden_begin, hidden_end in self._hidden:
            pieces.append(self._pending[begin : min(hidden_begin, end)])
            begin = min(hidden_end, end)
        pieces.append(self._pending[begin:end])
        self._pending = self._pending[end:]
        self._hidden = [(max(first - end, 0), last - end) for first, last in self._hidden if last > end]
        return "".join(pieces)

    def _num_held(self) -> int:
        """Count the last characters that may begin a stop string."""
        max_len = max(map(len, self.stop_strings), default=1) - 1
        lens = range(min(max_len, len(self._pending)), 0, -1)
        pending = self._pending
        return next((length for length in lens if any(s.startswith(pending[-length:]) for s in self.stop_strings)), 0)

    def _special_text(self, token_id: int) -> str:
        """Return the text of a special token, or an empty string for an ordinary token."""
        text = self._special_texts.get(token_id)
        if text is None:
            is_special = not self._decode([token_id])
            text = str(self.tokenizer.decode([token_id], skip_special_tokens=False)) if is_special else ""
            self._special_texts[token_id] = text
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
