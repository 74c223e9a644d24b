"""A request's text, and the results that the decoder thread passes to the event loop."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from torch import Tensor

from hf_speculate.options.refill.row_prompts import RowPrompt, RowResult, RowRound
from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.logprobs import TokenLogprob, token_logprobs
from hf_speculate.tools.server.text_stream import MarkedText
from hf_speculate.tools.server.token_origins import TARGET, SpeculationTotals, TokenPiece


class TextRequest(NamedTuple):
    """One text of a request."""

    prompt: RowPrompt
    echoed: str = ""  # beginning of the text, which is the prompt if the request echoes it
    # number of most likely tokens per position; None without log probabilities
    num_top: int | None = None
    continues: bool = False  # whether the text continues the prompt's text, as completions do
    # whether pieces contain special tokens, for a response template
    shows_special: bool = False
    has_origins: bool = False  # whether the request asks for the origins of tokens


class Piece(NamedTuple):
    """A piece of a text.

    It includes its tokens if log probabilities were requested.
    """

    text: str
    logprobs: list[TokenLogprob]
    tokens: Sequence[TokenPiece] = ()  # tokens of the text if origins were requested
    marked: MarkedText = MarkedText()  # text with special tokens, for a response template


class DecodeResult(NamedTuple):
    """The end of a text, with its row of tokens and counts."""

    finish_reason: Literal["stop", "length"]
    row: RowResult
    totals: SpeculationTotals | None = None  # None unless origins were requested


# keyed by the index of the text in its request
Pieces = AsyncGenerator[tuple[int, Piece | DecodeResult], None]


class Answer:
    """Channel from the decoder's thread to the event loop for one text.

    It passes tokens, then a result or an error. Only the newest item is kept. This item holds all
    tokens so far, so a client that does not read costs no memory.
    """

    def __init__(self, request: TextRequest):
        on_logits = None if request.num_top is None else self._add_logprobs
        on_round, self.request = self._add_origins if request.has_origins else None, request
        self.prompt = replace(request.prompt, key=self, on_logits=on_logits, on_round=on_round)
        self.is_wanted = True
        self.prompt_logprobs: list[TokenLogprob] = []
        # log probabilities of all tokens so far; kept even if the row is decoded again
        self.logprobs: list[TokenLogprob] = []
        self.origins: list[
            str
        ] = []  # origins of all tokens so far; replaced if the row is decoded again
        self.speedup: float | None = None  # estimate, computed once the text has ended
        self._times_s: list[float] = []  # times of the first and latest tokens
        self._loop = asyncio.get_running_loop()
        self._newest: Sequence[int] | RowResult | RequestError = ()
        self._is_new = asyncio.Event()

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens in the row, including the prompt."""
        return len(self.prompt.token_ids) + int(self.prompt.arguments["max_new_tokens"])

    def pieces(self, texts: Sequence[str], num_before: int) -> list[TokenPiece]:
        """Return tokens with their origins, after `num_before` others.

        The origin of tokens outside rounds is the target.
        """
        origins = self.origins[num_before : num_before + len(texts)]
        return [*map(TokenPiece, texts, origins + [TARGET] * (len(texts) - len(origins)))]

    def totals(self, row: RowResult) -> SpeculationTotals:
        """Return the totals of the finished row."""
        seconds, counts = self._times_s[-1] - self._times_s[0], (row.num_drafted, row.num_accepted)
        return SpeculationTotals(*counts, row.num_rounds, seconds, self.speedup)

    async def get(self) -> Sequence[int] | RowResult | RequestError:
        """Wait for something new."""
        await self._is_new.wait()
        self._is_new.clear()
        return self._newest

    def put(self, item: Sequence[int] | RowResult | RequestError) -> None:
        """Put an item unless the client has disconnected."""
        if item:
            self._times_s[1:] = [time.perf_counter()]
        if self.is_wanted:
            self._loop.call_soon_threadsafe(self._set, item)

    def _set(self, item: Sequence[int] | RowResult | RequestError) -> None:
        # After a result, errors of other texts come too late, as do tokens from the decoder thread
        # after an error.
        if not isinstance(self._newest, RowResult | RequestError):
            self._newest = item
        self._is_new.set()

    def _add_origins(self, new: RowRound) -> None:
        accepted = [new.drafted_by] * new.num_accepted
        origins = accepted + [TARGET] * (new.num_emitted - new.num_accepted)
        self.origins += [TARGET] * (new.num_before - len(self.origins))
        self.origins[new.num_before : new.num_before + new.num_emitted] = origins
        self._times_s[1:] = [time.perf_counter()]  # the first token does not have its own `put`

    def _add_logprobs(self, num_before: int, token_ids: Sequence[int], logits: Tensor) -> None:
        new = token_logprobs(token_ids, logits, self.request.num_top or 0)
        self.logprobs[num_before : num_before + len(new)] = new
