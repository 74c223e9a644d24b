"""Format answers like OpenAI, either whole or as server-sent events."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.errors import RequestError, error_body, request_error
from hf_speculate.tools.server.logprobs import (
    TokenLogprob,
    chat_format,
    completion_format,
    num_chars,
)
from hf_speculate.tools.server.prompts import text_requests
from hf_speculate.tools.server.response_template import ResponseReader
from hf_speculate.tools.server.schemas import ChatRequest, CompletionRequest
from hf_speculate.tools.server.text_request import DecodeResult, Piece, Pieces, TextRequest
from hf_speculate.tools.server.text_stream import MarkedText
from hf_speculate.tools.server.token_bytes import TokenBytes
from hf_speculate.tools.server.tool_calls import Said, ToolCallReader

# Prefix of an answer's id, and the names of a whole answer and of a chunk in a stream.
_CHAT_NAMES = ("chatcmpl", "chat.completion", "chat.completion.chunk")
_COMPLETION_NAMES = ("cmpl", "text_completion", "text_completion")
_NOTHING = Said()
_NO_PIECE = Piece("", [])
# Longer texts are split off the event loop, since 32,000 brackets take 0.6 s.
_NUM_CHARS_IN_THREAD = 8_192
_NUM_IN_THREAD = 512  # log probabilities of more tokens are formatted off the event loop


class Asked(NamedTuple):
    """Text requests for one request, and the format of its answer."""

    texts: list[TextRequest]
    num_choices: int  # number of texts per prompt
    is_chat: bool
    is_streamed: bool
    has_usage: bool  # whether a stream includes the usage; a whole answer always does
    has_tools: bool
    token_bytes: TokenBytes
    # one per text if the tokenizer has a response template
    readers: Sequence[ResponseReader] = ()

    def head(self, model: str) -> dict[str, Any]:
        """Return the fields that all parts of an answer share."""
        prefix, whole, chunk = _CHAT_NAMES if self.is_chat else _COMPLETION_NAMES
        head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": chunk if self.is_streamed else whole,
        }
        return {**head, "created": int(time.time()), "model": model}

    def choice(
        self,
        index: int,
        said: Said = _NOTHING,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        calls: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"text": said.content}
        reasoning = {"reasoning_content": said.reasoning} if said.reasoning else {}
        if self.is_chat and self.is_streamed:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            delta = reasoning | ({"content": said.content} if said.content else {})
            content = {"delta": delta | ({"tool_calls": numbered} if calls else {})}
        elif self.is_chat:
            message = {"role": "assistant", "content": said.content, **reasoning}
            called = {"content": said.content or None, "tool_calls": calls} if calls else {}
            content = {"message": message | called}
        reason = "tool_calls" if calls and reason == "stop" else reason
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def reader(self, index: int) -> ResponseReader | ToolCallReader | None:
        """Return the splitter for a text; None if the text is only content.

        Call this once per text.
        """
        if self.readers:
            return self.readers[index]
        return ToolCallReader() if self.has_tools else None

    def logprobs(
        self, index: int, tokens: list[TokenLogprob], offset: int = 0
    ) -> dict[str, Any] | None:
        """Format the log probabilities of a text's tokens after `offset` characters.

        None if they were not requested.
        """
        if self.texts[index].num_top is None:
            return None
        is_begin = self._is_begin(index, offset)
        if self.is_chat:
            return chat_format(tokens, self.token_bytes, is_begin)
        return completion_format(tokens, self.token_bytes, offset, is_begin)

    def num_chars(self, index: int, tokens: list[TokenLogprob], offset: int) -> int:
        """Count the characters of a text's tokens after its first `offset` characters."""
        return num_chars(tokens, self.token_bytes, self._is_begin(index, offset))

    def _is_begin(self, index: int, offset: int) -> bool:
        """Return whether a text begins at `offset`.

        A completion without its prompt continues the prompt's text.
        """
        return offset == 0 and (self.is_chat or bool(self.texts[index].echoed))


def asked_of(request: ChatRequest | CompletionRequest, engine: Engine, grammar: Any) -> Asked:
    """Translate a request, or raise `RequestError` if it is not supported.

    See `text_requests` for `grammar`.
    """
    texts, options = text_requests(request, engine, grammar), request.stream_options
    has_usage = options is not None and options.include_usage
    is_chat, has_tools = (
        isinstance(request, ChatRequest),
        isinstance(request, ChatRequest) and request.has_tools,
    )
    asked = Asked(
        texts, request.n, is_chat, request.stream, has_usage, has_tools, engine.token_bytes
    )
    if (
        engine.response_template is None
        or not texts[0].shows_special
        or not isinstance(request, ChatRequest)
    ):
        return asked
    # All texts of a chat share the same prompt and tools.
    token_ids, tools = list(texts[0].prompt.token_ids), request.template_options.get("tools")
    prompt = str(engine.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
    return asked._replace(readers=[engine.response_template.reader(prompt, tools) for _ in texts])


async def whole_answer(asked: Asked, pieces: Pieces, head: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer with all texts; None if the client disconnected before the end."""
    texts: list[list[Piece]] = [[] for _ in asked.texts]
    results: dict[int, DecodeResult] = {}
    async for index, piece in pieces:
        if isinstance(piece, DecodeResult):
            results[index] = piece
        else:
            texts[index].append(piece)
    if len(results) < len(texts):
        return None
    choices = []
    for index, parts in enumerate(texts):
        tokens = [token for part in parts for token in part.logprobs]
        reader = asked.reader(index)
        text, marked = "".join(part.text for part in parts), [part.marked for part in parts]
        whole = Piece(text, [], marked=MarkedText.join(marked))
        read = partial(_read, reader, whole, is_end=True)
        is_short = max(len(text), len(whole.marked)) < _NUM_CHARS_IN_THREAD
        said = read() if is_short else await asyncio.to_thread(read)
        reason, calls = results[index].finish_reason, reader.calls if reader else ()
        choices.append(
            asked.choice(index, said, reason, await _logprobs(asked, index, tokens), calls)
        )
    return {**head, "choices": choices, "usage": _usage(asked, list(results.values()))}


async def events(
    asked: Asked, pieces: Pieces, first: tuple[int, Piece | DecodeResult], head: dict[str, Any]
) -> AsyncIterator[str]:
    """Yield the server-sent events of an answer, beginning with its `first` piece."""

    def event(*choices: dict[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    async with aclosing(pieces):
        newest: tuple[int, Piece | DecodeResult] | None = first
        results, offsets = [], [0] * len(asked.texts)
        readers = [asked.reader(index) for index in range(len(asked.texts))]
        try:
            for index in range(len(asked.texts) if asked.is_chat else 0):
                yield event(asked.choice(index) | {"delta": {"role": "assistant", "content": ""}})
            while newest is not None:
                index, piece = newest
                if isinstance(piece, DecodeResult):
                    results.append(piece)
                    reader = readers[index]
                    for said in _deltas(_read(reader, _NO_PIECE, is_end=True)):
                        yield event(asked.choice(index, said))
                    calls = reader.calls if reader else ()
                    more = {} if piece.totals is None else {"speculation": piece.totals.as_dict()}
                    yield event(
                        asked.choice(index, reason=piece.finish_reason, calls=calls), **more
                    )
                else:
                    logprobs = await _logprobs(asked, index, piece.logprobs, offsets[index])
                    tokens = [token._asdict() for token in piece.tokens]
                    more = {"speculation": {"tokens": tokens}} if tokens else {}
                    deltas = _deltas(_read(readers[index], piece))
                    for said in deltas or ([_NOTHING] if logprobs or tokens else []):
                        yield event(asked.choice(index, said, logprobs=logprobs), **more)
                        logprobs, more = None, {}
                    offsets[index] += asked.num_chars(index, piece.logprobs, offsets[index])
                newest = await anext(pieces, None)
            if len(results) < len(asked.texts):
                return
            if asked.has_usage:
                yield event(usage=_usage(asked, results))
        except Exception as error:  # noqa: BLE001  # the client waits for the end of the stream
            sent_error = error if isinstance(error, RequestError) else request_error(error)
            yield f"data: {json.dumps(error_body(sent_error))}\n\n"
        yield "data: [DONE]\n\n"


def _read(
    reader: ResponseReader | ToolCallReader | None, piece: Piece, is_end: bool = False
) -> Said:
    if isinstance(reader, ResponseReader):
        return reader.read(piece.marked, is_end)
    return Said(piece.text) if reader is None else reader.read(piece.text, is_end)


def _deltas(said: Said) -> list[Said]:
    """Split into reasoning and content, since many clients expect separate events."""
    return [part for part in (Said(reasoning=said.reasoning), Said(said.content)) if any(part)]


async def _logprobs(
    asked: Asked, index: int, tokens: list[TokenLogprob], offset: int = 0
) -> dict[str, Any] | None:
    """Format log probabilities, in a thread if there are many.

    20,000 tokens may take a second.
    """
    if len(tokens) < _NUM_IN_THREAD:
        return asked.logprobs(index, tokens, offset)
    return await asyncio.to_thread(asked.logprobs, index, tokens, offset)


def _usage(asked: Asked, results: Sequence[DecodeResult]) -> dict[str, Any]:
    """Count the tokens of all texts in OpenAI's format, with statistics of speculative decoding.

    Each prompt counts once.
    """
    rows = [result.row for result in results]
    num_prompt = sum(len(text.prompt.token_ids) for text in asked.texts[:: asked.num_choices])
    num_new, num_rounds = (
        sum(len(row.token_ids) for row in rows),
        sum(row.num_rounds for row in rows),
    )
    num_drafted, num_accepted = (
        sum(row.num_drafted for row in rows),
        sum(row.num_accepted for row in rows),
    )
    speculation = {
        "rounds": num_rounds,
        "acceptance_rate": round(num_accepted / max(num_drafted, 1), 4),
        # The first token follows the prompt.
        "mean_acceptance_length": round((num_new - len(rows)) / max(num_rounds, 1), 4),
    }
    counts = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }
    return {**counts, "speculation": speculation}
