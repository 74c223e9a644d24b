"""Stream the text of a generation in pieces that are final."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from transformers import PreTrainedTokenizerBase

# Character that replaces incomplete bytes.
_PARTIAL_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 3  # tokens in an incomplete character, which has at most four bytes
# Special tokens that clients need as text, since they mark tool calls and reasoning; most
# tokenizers list them as ordinary text.
TAGS = {"<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]"}


@dataclass(frozen=True)
class MarkedText:
    """Text with special tokens, and a mark for each shown character."""

    text: str = ""
    marks: bytes = b""  # one per character: 1 if it is shown, 0 in special tokens

    @classmethod
    def of(cls, text: str, is_shown: bool = True) -> "MarkedText":
        return cls(text, bytes([is_shown]) * len(text))

    @classmethod
    def join(cls, parts: Sequence["MarkedText"]) -> "MarkedText":
        return cls("".join(part.text for part in parts), b"".join(part.marks for part in parts))

    @property
    def shown(self) -> str:
        """Text without special tokens."""
        return self.text if 0 not in self.marks else "".join(compress(self.text, self.marks))

    def __len__(self) -> int:
        return len(self.text)

    def __add__(self, other: "MarkedText") -> "MarkedText":
        return MarkedText(self.text + other.text, self.marks + other.marks)

    def __getitem__(self, part: slice) -> "MarkedText":
        return MarkedText(self.text[part], self.marks[part])


class TextStream:
    """Splits a text into pieces that are final.

    A piece has whole characters and does not contain the beginning of a stop string. Stop strings
    are searched for in the text with its special tokens, like in `StopStringCriteria`. Special
    tokens are not shown, except for the tags of tool calls and reasoning. A special token is
    returned whole or not at all: if a stop string begins inside it, the text ends before it. Tags
    are cut like other text, unless a response template reads them (`is_parsed`).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str],
        is_parsed: bool = False,
    ):
        self.tokenizer, self.stop_strings, self._is_parsed = tokenizer, stop_strings, is_parsed
        self.is_cut = False  # whether the text ended before a stop string
        self._num_read = 0  # number of the row's tokens read so far
        self._special_texts: dict[int, str] = {}  # text by token id; empty for ordinary tokens
        self._is_empty = True  # whether there has been no ordinary token yet
        self._ids: list[int] = []  # the latest ordinary tokens
        # how many of these have known text; they are decoded again, since a first token loses its
        # space
        self._num_given = 0
        self._pending = MarkedText()  # text not returned yet
        # begin and end of tokens in the pending text that must not be cut
        self._whole: list[tuple[int, int]] = []
        # index in the pending text of a space that only stop strings see
        self._lost_space: int | None = None

    def read(self, token_ids: Sequence[int], is_end: bool = False) -> str:
        """Return the shown text that all tokens so far make final.

        At the end, return all remaining text.
        """
        return self.read_marked(token_ids, is_end).shown

    def read_marked(self, token_ids: Sequence[int], is_end: bool = False) -> MarkedText:
        """Return the text of `read` with special tokens."""
        if len(token_ids) <= self._num_read and not is_end:
            return MarkedText()  # the row is decoded again
        for token_id in token_ids[self._num_read :]:
            if special_text := self._special_text(token_id):
                self._decode_characters()
                if self._is_parsed or special_text not in TAGS:
                    self._whole.append((len(self._pending), len(self._pending) + len(special_text)))
                self._pending += MarkedText.of(special_text, special_text in TAGS)
            else:
                if self._is_empty:
                    self._add_lost_space(token_id)
                self._ids.append(token_id)
        self._num_read = max(self._num_read, len(token_ids))
        self._decode_characters(is_end)
        if self.is_cut:
            return MarkedText()
        ends = [at for stop in self.stop_strings if (at := self._pending.text.find(stop)) >= 0]
        self.is_cut = bool(ends)
        end = min(ends) if ends else len(self._pending) - (0 if is_end else self._num_held())
        return self._take(next((begin for begin, last in self._whole if begin < end < last), end))

    @property
    def num_pending(self) -> int:
        """Number of characters read but not returned, including special tokens."""
        return len(self._pending) - (self._lost_space is not None)

    @property
    def num_undecoded(self) -> int:
        """Number of last tokens that do not form a whole character yet."""
        return len(self._ids) - self._num_given

    def _decode_characters(self, is_end: bool = False) -> None:
        """Add the text of the tokens so far to the pending text.

        The text ends with the last whole character unless `is_end`.
        """
        num_ids = len(self._ids)
        first = num_ids if is_end else max(num_ids - _MAX_HELD, self._num_given)
        text = ""
        for end in range(num_ids, first - 1, -1):
            text = self._decode(self._ids[:end])
            if is_end or not text.endswith(_PARTIAL_CHARACTER):
                break
        else:
            end = first  # no later token can complete these bytes
        if end <= self._num_given:
            return
        self._pending += MarkedText.of(text[len(self._decode(self._ids[: self._num_given])) :])
        self._ids, self._num_given = self._ids[self._num_given :], end - self._num_given

    def _add_lost_space(self, first_id: int) -> None:
        """Add the space that a decoded first token loses, since a stop string may begin with it."""
        self._is_empty = False
        text = self._decode([first_id])
        if self._decode([first_id, first_id])[len(text) :] == f" {text}":
            self._lost_space = len(self._pending)
            self._pending += MarkedText.of(" ")

    def _take(self, end: int) -> MarkedText:
        """Cut the pending text at `end`; return the text before it, without a lost space."""
        taken, self._pending = self._pending[:end], self._pending[end:]
        self._whole = [(first - end, last - end) for first, last in self._whole if last > end]
        if self._lost_space is not None:
            at, is_taken = self._lost_space, self._lost_space < end
            taken, self._lost_space = taken[:at] + taken[at + 1 :], None if is_taken else at - end
        return taken

    def _num_held(self) -> int:
        """Count the last characters that may begin a stop string."""
        longest = max(map(len, self.stop_strings), default=1) - 1
        lens = range(min(longest, len(self._pending)), 0, -1)
        pending = self._pending.text
        return next(
            (
                num_chars
                for num_chars in lens
                if any(stop.startswith(pending[-num_chars:]) for stop in self.stop_strings)
            ),
            0,
        )

    def _special_text(self, token_id: int) -> str:
        """Return the text of a special token; empty for an ordinary token.

        Otherwise, decoding might skip special tokens.
        """
        text = self._special_texts.get(token_id)
        if text is None:
            is_special = not self._decode([token_id])
            text = (
                str(self.tokenizer.decode([token_id], skip_special_tokens=False))
                if is_special
                else ""
            )
            self._special_texts[token_id] = text
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
