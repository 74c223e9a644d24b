"""Requested texts, and their way from the decoder's thread to the event loop."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from torch import Tensor

from hf_speculate.options.refill.row_prompts import RowPrompt, RowResult, RowRound
from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.logprobs import TokenLogprob, token_logprobs
from hf_speculate.tools.server.token_origins import TARGET, SpeculationTotals, TokenPiece


class TextRequest(NamedTuple):
    """One text of a request."""

    prompt: RowPrompt
    echoed: str = ""  # the prompt's text if the request has `echo`
    num_top: int | None = None  # number of most likely tokens per position; None without log probabilities
    continues: bool = False  # whether the text continues its prompt's text, as a completion does
    shows_special: bool = False  # whether pieces keep special tokens, for a response template
    has_origins: bool = False  # whether origins of its tokens are requested


class Piece(NamedTuple):
    """A piece of a text with its tokens."""

    text: str
    logprobs: list[TokenLogprob]  # empty unless log probabilities are requested
    tokens: Sequence[TokenPiece] = ()  # empty unless origins are requested


class DecodeResult(NamedTuple):
    """Result of a finished text."""

    finish_reason: Literal["stop", "length"]
    row: RowResult  # tokens, and counts of the rounds
    totals: SpeculationTotals | None = None  # None unless origins are requested


Pieces = AsyncGenerator[tuple[int, Piece | DecodeResult], None]  # (index of the text in its request, piece)


class Answer:
    """Channel from decoder thread to event loop.

    It passes the tokens of one text, then a result or an error. Each item has all tokens so far, and only the newest is
    stored: a client that does not read costs no memory.
    """

    def __init__(self, request: TextRequest):
        on_logits = None if request.num_top is None else self._add_logprobs
        on_round, self.request = self._add_origins if request.has_origins else None, request
        self.prompt = replace(request.prompt, key=self, on_logits=on_logits, on_round=on_round)
        self.is_wanted = True
        self.prompt_logprobs: list[TokenLogprob] = []
        self.logprobs: list[TokenLogprob] = []  # one per token so far; stays if the row is decoded again
        self.origins: list[str] = []  # one per token so far; changes if the row is decoded again
        self.speedup: float | None = None  # estimated after the end of the text
        self._times_s: list[float] = []  # times of the first and the latest token
        self._loop = asyncio.get_running_loop()
        self._newest: Sequence[int] | RowResult | RequestError = ()
        self._is_new = asyncio.Event()

    @property
    def max_tokens(self) -> int:
        """Maximum length of the row, prompt included."""
        return len(self.prompt.token_ids) + int(self.prompt.arguments["max_new_tokens"])

    def pieces(self, texts: Sequence[str], num_before: int) -> list[TokenPiece]:
        """Pair the texts of tokens after `num_before` others with their origins.

        Tokens outside of rounds come from the target.
        """
        origins = self.origins[num_before : num_before + len(texts)]
        return [*map(TokenPiece, texts, origins + [TARGET] * (len(texts) - len(origins)))]

    def totals(self, row: RowResult) -> SpeculationTotals:
        """Return the totals of the finished row."""
        seconds, counts = self._times_s[-1] - self._times_s[0], (row.num_drafted, row.num_accepted)
        return SpeculationTotals(*counts, row.num_rounds, seconds, self.speedup)

    async def get(self) -> Sequence[int] | RowResult | RequestError:
        """Wait for a new item."""
        await self._is_new.wait()
        self._is_new.clear()
        return self._newest

    def put(self, item: Sequence[int] | RowResult | RequestError) -> None:
        """Put an item; it is dropped if `is_wanted` is False."""
        if item:
            self._times_s[1:] = [time.perf_counter()]
        if self.is_wanted:
            self._loop.call_soon_threadsafe(self._set, item)

    def _set(self, item: Sequence[int] | RowResult | RequestError) -> None:
        # A result or error is final: later errors of other requests, and later tokens, are ignored.
        if not isinstance(self._newest, RowResult | RequestError):
            self._newest = item
        self._is_new.set()

    def _add_origins(self, new: RowRound) -> None:
        accepted = [new.drafted_by] * new.num_accepted
        origins = accepted + [TARGET] * (new.num_emitted - new.num_accepted)
        self.origins += [TARGET] * (new.num_before - len(self.origins))
        self.origins[new.num_before : new.num_before + new.num_emitted] = origins
        self._times_s[1:] = [time.perf_counter()]  # the first token has no `put` of its own

    def _add_logprobs(self, num_before: int, token_ids: Sequence[int], logits: Tensor) -> None:
        new = token_logprobs(token_ids, logits, self.request.num_top or 0)
        self.logprobs[num_before : num_before + len(new)] = new
