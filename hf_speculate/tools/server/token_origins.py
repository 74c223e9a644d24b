"""Origins of an answer's tokens: the draft source of each token, with its piece of the text."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hf_speculate.tools.server.text_stream import TextStream

TARGET = "target"


class TokenPiece(NamedTuple):
    """Text and origin of one token.

    If several tokens spell one character, the last token has it.
    """

    text: str
    origin: str  # TARGET, or the draft source of an accepted token as in `stats.plan`


class TokenTexts:
    """Splitter of a stream into its tokens' texts.

    The texts join to the stream's text. A token is returned once all of its text is final.
    """

    def __init__(self, stream: TextStream):
        self._stream = stream
        self._text = ""  # final text of tokens to return later
        # Characters before the first token to return later, then up to the end of each such token.
        self._ends: list[int] = [0]
        self._num_final = 0  # characters of the final text
        self._num_read = 0  # tokens of the row

    def read(self, token_ids: Sequence[int], is_end: bool = False) -> list[str]:
        """Return the token texts that became final; at the end all remaining ones.

        Args:
            token_ids: all tokens of the row so far.
            is_end: whether the row has ended.
        """
        for num_tokens in range(self._num_read + 1, len(token_ids) + 1):
            self._add(self._stream.read(token_ids[:num_tokens]))
            self._ends.append(self._num_final + self._stream.num_pending)
        self._num_read = max(self._num_read, len(token_ids))
        num_decoded = len(self._ends) - 1 - self._stream.num_undecoded
        num_returned = min(sum(end <= self._num_final for end in self._ends) - 1, num_decoded)
        if is_end:
            self._add(self._stream.read(token_ids, is_end=True))
            num_returned = len(self._ends) - 1
            self._ends = [*(min(end, self._num_final) for end in self._ends[:-1]), self._num_final]
        begin, texts = self._ends[0], []
        for first, last in pairwise(self._ends[: num_returned + 1]):
            texts.append(self._text[first - begin : last - begin])
        self._ends = self._ends[num_returned:]
        self._text = self._text[self._ends[0] - begin :]
        return texts

    def _add(self, text: str) -> None:
        self._text += text
        self._num_final += len(text)


class SpeculationTotals(NamedTuple):
    """Totals of an answer's rounds, and its speed-up."""

    num_drafted: int
    num_accepted: int
    num_rounds: int
    seconds: float  # time from the first token to the last
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
