"""The origins of an answer's tokens: each token's draft source, with its piece of the text."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hf_speculate.tools.server.text_stream import MarkedText, TextStream

TARGET = "target"


class TokenPiece(NamedTuple):
    """The text of one token.

    If several tokens spell one character, the last of them holds it.
    """

    text: str
    origin: str  # TARGET, or the draft source of an accepted token, as in `stats.plan`


class TokenTexts:
    """Splits a stream's text into the texts of its tokens.

    Joined together, these are the stream's text. A token is returned whole, once all of its text is
    final.
    """

    def __init__(self, stream: TextStream):
        self._stream = stream
        self._text = MarkedText()  # final text of tokens not returned yet
        # number of characters up to the first token not returned, then up to each later token
        self._ends: list[int] = [0]
        self._num_final = 0  # number of characters in the final text
        self._num_read = 0  # number of the row's tokens read so far

    def read(self, token_ids: Sequence[int], is_end: bool = False) -> list[MarkedText]:
        """Return the texts that all tokens so far make final; at the end, all remaining texts."""
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
    """Totals over an answer's rounds."""

    num_drafted: int
    num_accepted: int
    num_rounds: int
    seconds: float  # from the first token to the last
    speedup: float | None  # estimate relative to plain decoding; None without a measured plain step

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": [],
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "rounds": self.num_rounds,
            "seconds": round(self.seconds, 4),
            "speedup": None if self.speedup is None else round(self.speedup, 3),
        }
