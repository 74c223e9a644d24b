"""Origins of an answer's tokens: the draft source of each, with its piece of the text."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hf_speculate.tools.server.text_stream import MarkedText, TextStream

TARGET = "target"


class TokenPiece(NamedTuple):
    """Text of one token.

    Several tokens may spell one character; the last of them has it.
    """

    text: str
    origin: str  # TARGET, or the draft source of an accepted token as in `stats.plan`


class TokenTexts:
    """Splitter of a stream's text into its tokens' texts.

    The texts join to the stream's text. A token is returned whole, once all of its text is final.
    """

    def __init__(self, stream: TextStream):
        self._stream = stream
        self._text = MarkedText()  # final text of tokens not returned yet
        # characters of the text up to the first token not returned, then up to each later one
        self._ends: list[int] = [0]
        self._num_final = 0  # characters of the final text
        self._num_read = 0  # tokens of the row

    def read(self, token_ids: Sequence[int], is_end: bool = False) -> list[MarkedText]:
        """Return texts made final by these tokens, all so far; at the end all remaining texts."""
        for num_tokens in range(self._num_read + 1, len(token_ids) + 1):
            self._add(self._stream.read_marked(token_ids[:num_tokens]))
            self._ends.append(self._num_final + self._stream.num_pending)
        self._num_read = max(self._num_read, len(token_ids))
        num_decoded = len(self._ends) - 1 - self._stream.num_undecoded
        num_given = min(sum(end <= self._num_final for end in self._ends) - 1, num_decoded)
        if is_end:
            self._add(self._stream.read_marked(token_ids, is_end=True))
            num_given = len(self._ends) - 1
            self._ends = [*(min(end, self._num_final) for end in self._ends[:-1]), self._num_final]
        begin, texts = self._ends[0], list[MarkedText]()
        for first, last in pairwise(self._ends[: num_given + 1]):
            texts.append(self._text[first - begin : last - begin])
        self._ends = self._ends[num_given:]
        self._text = self._text[self._ends[0] - begin :]
        return texts

    def _add(self, text: MarkedText) -> None:
        self._text += text
        self._num_final += len(text)


class SpeculationTotals(NamedTuple):
    """Totals of an answer's rounds."""

    num_drafted: int
    num_accepted: int
    num_rounds: int
    seconds: float  # from the first token to the last
    speedup: float | None  # estimate over plain decoding; None without a measured plain step

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": [],
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "rounds": self.num_rounds,
            "seconds": round(self.seconds, 4),
            "speedup": None if self.speedup is None else round(self.speedup, 3),
        }
