"""The engine: a queue of requests for a decoder, whose thread streams their texts."""

import asyncio
import importlib.util
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_speculate.errors import SpeculateError
from hf_speculate.generation.request import check_source, find_source_of
from hf_speculate.models.language_model import cache_name
from hf_speculate.models.recurrent_layers import recurrent_cache
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.options.refill.continuous import PREFILL_CHUNK_TOKENS, ContinuousDecoder
from hf_speculate.options.refill.row_prompts import RowPrompt, RowResult, RowRound
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.server.errors import RequestError, busy_error, closing_error, request_error
from hf_speculate.tools.server.logprobs import TokenLogprob, prompt_logprobs
from hf_speculate.tools.server.merged import merged
from hf_speculate.tools.server.response_format import (
    GrammarCompiler,
    GrammarLimits,
    GrammarProcessor,
)
from hf_speculate.tools.server.response_template import ResponseTemplate
from hf_speculate.tools.server.text_request import Answer, DecodeResult, Piece, TextRequest
from hf_speculate.tools.server.text_stream import MarkedText, TextStream
from hf_speculate.tools.server.token_bytes import TokenBytes
from hf_speculate.tools.server.token_origins import TokenPiece, TokenTexts
from hf_speculate.tools.server.tool_grammar import CallFormat
from hf_speculate.types import RoundReport

_CHARS_PER_TOKEN = 16  # characters per token of the longest prompt; ordinary text has about 4
_USUAL_LENGTH = 131_072  # tokens in the longest prompt if the target's context is unlimited
_POLL_S = 0.2  # seconds between checks for a disconnected client while no text comes
# Errors that concern a single row; an error of another class ends all requests.
_ROW_ERRORS = (
    SpeculateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(eq=False)
class Engine:
    """Decoder for up to `num_rows` requests at once.

    The next request takes the place of a finished row.
    """

    target: PreTrainedModel  # the enabled target
    tokenizer: PreTrainedTokenizerBase  # the target's tokenizer
    name: str  # name of the served target
    options: dict[str, Any]  # arguments of `generate()` for all requests, such as the draft model
    num_rows: int = 8  # rows decoded at once, >= 1
    max_queued: int = 64  # largest number of waiting requests, >= 0
    # number of tokens in the target's cache: rows decoded at once, times the maximum length of a
    # row, including its prompt
    max_cache_tokens: int | None = None
    # limits on compiling a `response_format` or the parameters of tools
    grammar_limits: GrammarLimits = field(default_factory=GrammarLimits)

    def __post_init__(self) -> None:
        self.target = unwrapped(self.target)
        context: int | None = getattr(
            self.target.config.get_text_config(), "max_position_embeddings", None
        )
        limits = [limit for limit in (context, self.max_cache_tokens) if limit is not None]
        self.max_length = min(limits, default=None)  # maximum number of tokens in prompt and answer
        # maximum number of characters in a prompt
        self.max_chars = _CHARS_PER_TOKEN * (self.max_length or _USUAL_LENGTH)
        self.token_bytes = TokenBytes(self.tokenizer)
        self.response_template = ResponseTemplate.of(self.tokenizer)
        self.call_format = CallFormat.of(self.tokenizer, self.response_template)
        self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size, self.grammar_limits)
        self._decoder = self._make_decoder()
        # why requests are decoded one by one; empty if they are not, or if this is the user's
        # choice
        self.obstacle = ""
        if self.num_rows > 1:
            greedy = RowPrompt([0], None, {"max_new_tokens": 1, "do_sample": False})
            sampled = RowPrompt(
                [0], 0, {"max_new_tokens": 1, "do_sample": True, "verifier": "coupled"}
            )
            self.obstacle = self._decoder.obstacle(greedy) or self._decoder.obstacle(sampled)
        if self.obstacle:
            self.num_rows = 1
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        self._lock = threading.RLock()  # guards the following fields
        self._open: set[Answer] = set()
        self._waiting: deque[Answer] = deque()
        self._begun: set[Answer] = set()  # rows in the decoder, even of disconnected clients
        # Answers that get a row once the log probabilities of their prompts are known. The
        # decoder's thread reads the first prompt chunk by chunk.
        self._echoing: deque[tuple[Answer, Iterator[list[TokenLogprob]]]] = deque()
        self._observers: list[Callable[[RowResult], object]] = []
        # number of forwards in former decoders, and for rows decoded one by one
        self._num_other_forwards = 0
        self._has_overtaken = False  # whether a prompt has begun since the last of these chunks
        self._is_decoding = self._is_closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._open) - len(self._waiting)

    @property
    def num_target_forwards(self) -> int:
        """Number of the target's forwards after prompts so far."""
        with self._lock:
            return self._num_other_forwards + self._decoder.stats.num_target_forwards

    @property
    def draft_source(self) -> str:
        """Description of the draft source for all requests; "none" if there is no usable source."""
        arguments, generate = dict(self.options), cast(Callable[..., Any], self.target.generate)
        try:
            source = find_source_of(self.target, generate, arguments, {}).source
            source = source and check_source(self.target, source, arguments)
        except SpeculateError:  # requests will fail, or use plain decoding
            source = None
        return "none" if source is None else source.description

    def observe_rows(self, observer: Callable[[RowResult], object]) -> None:
        """Register a function that is called with each finished row, in the decoder's thread.

        The function must not raise an error.
        """
        self._observers.append(observer)

    @property
    def vocab_size(self) -> int:
        embeddings: Any = self.target.get_input_embeddings()
        return int(embeddings.num_embeddings)

    @property
    def max_texts(self) -> int:
        """Maximum number of open texts, including the texts of the current request."""
        return self.num_rows + self.max_queued

    @property
    def eos_token_ids(self) -> list[int]:
        """End-of-text ids for requests that do not set their own."""
        eos: Any = self.target.generation_config.eos_token_id
        return [] if eos is None else list(eos) if isinstance(eos, list) else [eos]

    def check_room(self, num_texts: int = 1) -> None:
        """Raise `RequestError` if the engine has no room for `num_texts` further texts."""
        with self._lock:
            if self._is_closed:
                raise closing_error()
            if len(self._open) + num_texts > self.max_texts:
                got = "one more" if num_texts == 1 else f"{num_texts} more"
                raise busy_error(
                    f"at most {self.max_queued} requests may wait, got {got}; try again later"
                )

    async def stream(
        self, requests: Sequence[TextRequest], is_gone: Callable[[], Awaitable[bool]]
    ) -> AsyncGenerator[tuple[int, Piece | DecodeResult], None]:
        """Yield the pieces of each text, then its result, each with the index of its request.

        A text ends without a result once the client `is_gone`. Closing the generator frees the
        request's rows.
        """
        answers = self._submit(requests)
        try:
            async with aclosing(
                merged([self._pieces(answer, is_gone) for answer in answers])
            ) as pieces:
                async for index, piece in pieces:
                    yield index, piece
        finally:
            with self._lock:
                for answer in answers:
                    self._leave(answer)

    async def _pieces(
        self, answer: Answer, is_gone: Callable[[], Awaitable[bool]]
    ) -> AsyncGenerator[Piece | DecodeResult, None]:
        arguments, echoed, num_sent = answer.prompt.arguments, answer.request.echoed, 0
        stops = [stop for each in arguments.get("stopping_criteria", ()) for stop in each.stops]
        text = TextStream(self.tokenizer, stops, answer.request.shows_special)
        texts, num_given = TokenTexts(text) if answer.request.has_origins else None, 0
        has_begun = not answer.request.continues
        while not await is_gone():
            try:
                new = await asyncio.wait_for(answer.get(), _POLL_S)
            except TimeoutError:
                continue
            if isinstance(new, RequestError):
                raise new
            if isinstance(new, RowResult) and new.error is not None:
                raise request_error(new.error)
            if echoed:
                yield Piece(echoed, answer.prompt_logprobs)
                echoed = ""
            is_end = isinstance(new, RowResult)
            token_ids = new.token_ids if isinstance(new, RowResult) else new
            logprobs, tokens = answer.logprobs[num_sent : len(token_ids)], list[TokenPiece]()
            if texts is None:
                marked = text.read_marked(token_ids, is_end)
            else:
                read = texts.read(token_ids, is_end)
                tokens = answer.pieces([each.shown for each in read], num_given)
                marked = MarkedText.join(read)
                num_given += len(tokens)
            marked, piece = marked if answer.request.shows_special else MarkedText(), marked.shown
            if piece and not has_begun:
                piece, has_begun = self._lost_space(token_ids) + piece, True
            if piece or tokens or len(marked) or (is_end and logprobs):
                yield Piece(piece, logprobs, tokens, marked)
                num_sent += len(logprobs)
            if isinstance(new, RowResult):
                has_ended = text.is_cut or token_ids[-1] in arguments.get(
                    "eos_token_id", self.eos_token_ids
                )
                with self._lock:
                    self._leave(answer)  # other texts of the request may go on
                totals = None if texts is None else answer.totals(new)
                yield DecodeResult("stop" if has_ended else "length", new, totals)
                return

    def _lost_space(self, token_ids: Sequence[int]) -> str:
        """Return the space that decoding would lose at the start of a continued text, if any.

        A first token may lose its space if it is decoded on its own.
        """
        bytes_of = self.token_bytes
        shown = next(
            (token_id for token_id in token_ids if token_id not in bytes_of.hidden_ids), None
        )
        return " " if shown is not None and bytes_of(shown) != bytes_of.first(shown) else ""

    def _leave(self, answer: Answer) -> None:
        answer.is_wanted = False
        self._open.discard(answer)
        if answer in self._waiting:
            self._waiting.remove(answer)

    def end_requests(self) -> None:
        """End all requests, including later ones, with status 503."""
        with self._lock:
            self._is_closed = True
            self._end_all(closing_error())

    def close(self) -> None:
        self.end_requests()
        self.grammars.close()
        self._thread.shutdown()

    def _next(self) -> RowPrompt | None:
        """Return the next prompt in order of arrival; this is the decoder's `RowSource`.

        Prompts whose log probabilities are requested wait until these are read.
        """
        if self._echoing and self._has_overtaken:
            return self._read_echoing()
        while True:
            with self._lock:
                if not self._waiting or not self._fits(self._waiting[0]):
                    break  # shorter prompts do not overtake
                answer = self._waiting.popleft()
                request = answer.request
                if not request.echoed or request.num_top is None:
                    self._begun.add(answer)
                    self._has_overtaken = bool(self._echoing)
                    return answer.prompt
            chunks = prompt_logprobs(
                self.target, answer.prompt.token_ids, request.num_top, self._chunk_size
            )
            self._echoing.append((answer, chunks))
        return self._read_echoing() if self._echoing else None

    def _read_echoing(self) -> RowPrompt | None:
        """Read a chunk of a prompt for its log probabilities.

        Returns:
            The prompt once all of it is read and its row fits, None before.
        """
        self._has_overtaken = False
        answer, chunks = self._echoing[0]
        try:
            chunk = next(chunks, None) if answer.is_wanted else []
        except _ROW_ERRORS as error:
            answer.put(request_error(error))
            chunk = []
        if chunk:
            answer.prompt_logprobs += chunk
            return None
        with self._lock:
            if chunk is None and not self._fits(answer):
                self._has_overtaken = True  # no other prompt may begin now
                return None
            self._echoing.popleft()
            if chunk is None:
                self._begun.add(answer)
                return answer.prompt
        return None

    @property
    def _chunk_size(self) -> int | None:
        """Tokens per forward that reads a prompt's log probabilities; None for a single forward."""
        if recurrent_cache(self.target) is not None or not cache_name(self.target):
            return None
        return self.target.generation_config.prefill_chunk_size or PREFILL_CHUNK_TOKENS

    def _fits(self, answer: Answer) -> bool:
        lens = [row.max_tokens for row in (*self._begun, answer)]
        return self.max_cache_tokens is None or len(lens) * max(lens) <= self.max_cache_tokens

    @property
    def _with_grammar(self) -> dict[str, Any]:
        """Arguments of `generate()` to draft text that a grammar forces, unless disabled."""
        has_grammars = importlib.util.find_spec("xgrammar") is not None
        is_off = getattr(self.target.generation_config, "grammar_draft", None) is False
        return (
            {"grammar_draft": True, "tokenizer": self.tokenizer}
            if has_grammars and not is_off
            else {}
        )

    def _make_decoder(self) -> ContinuousDecoder:
        pad_id = int(self.tokenizer.pad_token_id or 0)
        # The arguments apply to all rows, because rows without a grammar share the batch.
        options = {**self._with_grammar, **self.options}
        return ContinuousDecoder(
            self.target, self.num_rows, options, pad_id, on_tokens=_add_tokens, ends_rows=True
        )

    def _submit(self, requests: Sequence[TextRequest]) -> list[Answer]:
        with self._lock:
            self.check_room(len(requests))
            answers = [Answer(request) for request in requests]
            self._open.update(answers)
            self._waiting.extend(answers)
            if not self._is_decoding:
                self._is_decoding = True
                self._thread.submit(self._decode).add_done_callback(self._on_end)
            return answers

    def _decode(self) -> None:
        """Decode until no requests are left; runs in the decoder's thread."""
        while True:
            decoded = self._decode_one_by_one() if self.num_rows == 1 else self._decode_together()
            for results in decoded:
                for result in results:
                    self._begun.discard(result.prompt.key)
                    for observer in self._observers:
                        observer(result)
                    result.prompt.key.put(self._checked(result))
            with self._lock:
                if not (self._waiting or self._echoing):
                    self._is_decoding = False
                    return

    def _checked(self, result: RowResult) -> RowResult:
        """Return the result, with an error if its grammar did not lead to a valid text."""
        for processor in (
            result.prompt.arguments.get("logits_processor", ()) if result.error is None else ()
        ):
            if _is_grammar(processor):
                result = result._replace(error=processor.error_of(result.token_ids, self.tokenizer))
        return result

    def _decode_together(self) -> Iterator[list[RowResult]]:
        """Decode like `ContinuousDecoder.decode`.

        The speed-up reported for a row is that of all rows so far.
        """
        for results in self._decoder.decode(self._next):
            for prompt in [result.prompt for result in results]:
                if prompt.on_round is not None:
                    prompt.key.speedup = self._decoder.stats.speedup
            yield results

    def _decode_one_by_one(self) -> Iterator[list[RowResult]]:
        """Decode like `ContinuousDecoder.decode`, but one row after another.

        This is for models and drafters that do not support joining rows.
        """
        decode: Any = self.target.generate
        while (prompt := self._next()) is not None:
            stats, streamer = SpeculationStats(), _Streamer(prompt)
            input_ids = torch.tensor([prompt.token_ids], device=self.target.device)  # [1, T]
            grammar_options = (
                self._with_grammar
                if any(map(_is_grammar, prompt.arguments.get("logits_processor", ())))
                else {}
            )
            arguments = {
                **grammar_options,
                **self.options,
                **prompt.arguments,
                "streamer": streamer,
                "speculation_stats": stats,
            }
            if prompt.seed is not None:
                arguments["seed"] = prompt.seed
            if prompt.on_round is not None:
                arguments["speculation_callback"] = streamer.on_round
            error: Exception | None = None
            try:
                decode(input_ids, attention_mask=torch.ones_like(input_ids), **arguments)
            except _CancelledError:
                pass
            except _ROW_ERRORS as raised:
                error = raised
            self._num_other_forwards += stats.num_target_forwards
            if error is None and prompt.on_logits is not None:
                error = self._score(prompt, streamer.ids)
            prompt.key.speedup = stats.speedup
            yield [
                RowResult(
                    prompt,
                    streamer.ids,
                    stats.num_rounds,
                    stats.num_drafted,
                    stats.num_accepted,
                    error,
                )
            ]

    def _score(self, prompt: RowPrompt, token_ids: list[int]) -> Exception | None:
        """Read a whole text again to get the log probabilities of its new tokens.

        Returns:
            The target's error, or None.
        """
        answer: Answer = prompt.key
        ids = [*prompt.token_ids, *token_ids]
        try:
            chunks = prompt_logprobs(
                self.target, ids, answer.request.num_top or 0, self._chunk_size
            )
            answer.logprobs = [*chain.from_iterable(chunks)][len(prompt.token_ids) :]
        except _ROW_ERRORS as error:
            return error
        return None

    def _on_end(self, done: "Future[None]") -> None:
        """Fail all requests after an error in the decoder; later requests get a new decoder."""
        error = done.exception()
        if error is not None:
            with self._lock:
                decoder = self._make_decoder()
                self._num_other_forwards, self._decoder = self.num_target_forwards, decoder
                self._is_decoding = False
                self._begun.clear()
                self._echoing.clear()
                self._end_all(request_error(error))

    def _end_all(self, error: RequestError) -> None:
        for answer in self._open:
            answer.put(error)
            answer.is_wanted = False
        self._waiting.clear()


def _is_grammar(processor: object) -> bool:
    return isinstance(processor, GrammarProcessor)


def _add_tokens(prompt: RowPrompt, token_ids: Sequence[int]) -> bool:
    answer: Answer = prompt.key
    answer.put(list(token_ids))
    return answer.is_wanted


class _CancelledError(Exception):
    """The text of the prompt is no longer wanted."""


class _Streamer(BaseStreamer):
    """Streamer that passes on all tokens so far after each round."""

    def __init__(self, prompt: RowPrompt):
        self.ids: list[int] = []
        self._prompt, self._is_prompt = prompt, True

    def put(self, value: Tensor) -> None:
        """Add new tokens; the first call contains the prompt."""
        if not self._is_prompt:
            self.ids += value.flatten().tolist()
        self._is_prompt = False
        if not _add_tokens(self._prompt, self.ids):
            raise _CancelledError

    def on_round(self, report: RoundReport) -> None:
        """Report the origins of a round's tokens; used as `speculation_callback`.

        The tokens follow later.
        """
        on_round, num_emitted = self._prompt.on_round, report.num_emitted[0]
        if on_round is not None:
            num_accepted = min(report.num_accepted[0], num_emitted)
            on_round(RowRound(len(self.ids), num_emitted, num_accepted, report.drafted_by[0]))

    def end(self) -> None:
        """End the stream; the result contains all tokens."""
