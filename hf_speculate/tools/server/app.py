"""FastAPI application with OpenAI's endpoints over an engine, and the server that runs it."""

import asyncio
import json
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from hf_speculate.tools.server.engine import DecodeResult, Engine, RequestError, request_error
from hf_speculate.tools.server.schemas import NEUTRAL, ChatRequest, CompletionRequest, check_model, row_prompt

Answer = AsyncGenerator[str | DecodeResult, None]
# Begin of an answer's id, and names of a whole answer and of a chunk of a streamed one.
_NAMES = {
    ChatRequest: ("chatcmpl", "chat.completion", "chat.completion.chunk"),
    CompletionRequest: ("cmpl", "text_completion", "text_completion"),
}
_ANSWER_S = 5  # at a shutdown, for the error answers of the requests that were not finished


def make_app(engine: Engine) -> FastAPI:
    """Routes and error handlers over an engine, which is closed with the application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="hf_speculate", lifespan=lifespan)
    model = {"id": engine.name, "object": "model", "created": int(time.time()), "owned_by": "hf_speculate"}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "running": engine.num_running, "waiting": engine.num_waiting}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name, engine)
        return model

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: Request) -> Any:
        return await _answer(engine, body, http)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Any:
        return await _answer(engine, body, http)

    for kind in (RequestError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _error_response)
    return app


class GracefulServer(uvicorn.Server):
    """Serves an engine; after `grace_s` seconds of a shutdown, requests in flight end with an error."""

    def __init__(self, engine: Engine, grace_s: float):
        timeout = int(grace_s) + _ANSWER_S
        super().__init__(uvicorn.Config(make_app(engine), log_level="warning", timeout_graceful_shutdown=timeout))
        self._engine, self._grace_s = engine, grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace_s, self._engine.end_requests)
        await super().shutdown(sockets)


async def _answer(engine: Engine, body: ChatRequest | CompletionRequest, http: Request) -> Any:
    answer = engine.stream(row_prompt(body, engine), http.is_disconnected)
    prefix, whole, chunk = _NAMES[type(body)]
    head: dict[str, Any] = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": chunk if body.stream else whole}
    head |= {"created": int(time.time()), "model": engine.name}
    if not body.stream:
        pieces = [piece async for piece in answer]
        if not pieces or isinstance(pieces[-1], str):
            return None  # the client has left
        text, result = "".join(map(str, pieces[:-1])), pieces[-1]
        return {**head, "choices": [_choice(body, text, result.finish_reason)], "usage": _usage(result)}
    first = await anext(answer, None)  # an error of generate() is then an error response, not a broken stream
    if first is None:
        return None
    return StreamingResponse(_events(answer, first, head, body), media_type="text/event-stream")


async def _events(
    answer: Answer, first: str | DecodeResult, head: dict[str, Any], body: ChatRequest | CompletionRequest
) -> AsyncIterator[str]:
    """Server-sent events of an answer whose first piece is known."""

    def event(*choices: dict[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    async with aclosing(answer):
        if isinstance(body, ChatRequest):
            yield event(_choice(body) | {"delta": {"role": "assistant", "content": ""}})
        piece: str | DecodeResult | None = first
        try:
            while isinstance(piece, str):
                yield event(_choice(body, piece))
                piece = await anext(answer, None)
        except RequestError as error:  # the status is sent already
            yield f"data: {json.dumps(_error_body(error))}\n\n"
            return
        if piece is None:
            return
        yield event(_choice(body, reason=piece.finish_reason))
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(usage=_usage(piece))
        yield "data: [DONE]\n\n"


def _choice(body: ChatRequest | CompletionRequest, text: str = "", reason: str | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"text": text}
    if isinstance(body, ChatRequest):
        delta = {"delta": {"content": text} if text else {}}
        content = delta if body.stream else {"message": {"role": "assistant", "content": text}}
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def _usage(result: DecodeResult) -> dict[str, Any]:
    """OpenAI's counts, and statistics of speculative decoding."""
    row = result.row
    num_prompt, num_new = len(row.prompt.token_ids), len(row.token_ids)
    speculation = {
        "rounds": row.num_rounds,
        "acceptance_rate": round(row.num_accepted / max(row.num_drafted, 1), 4),
        # The first token follows the prompt.
        "mean_acceptance_length": round((num_new - 1) / max(row.num_rounds, 1), 4),
    }
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    return {**counts, "speculation": speculation}


def _error_body(error: RequestError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "rate_limit_error" if error.status == 429 else kind
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


async def _error_response(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"][1:]))
        message = f"{param}: {first['msg']}"
        if first["type"] == "extra_forbidden" and param in NEUTRAL:
            values = " or ".join(map(json.dumps, NEUTRAL[param]))
            message = f"{param} must be {values}, got {json.dumps(first['input'])}; other values are not supported"
        error = RequestError(message, param or None)
    elif isinstance(error, HTTPException):
        error = RequestError(str(error.detail), status=error.status_code)
    found = error if isinstance(error, RequestError) else request_error(error)
    headers = {"Retry-After": "1"} if found.status == 429 else None
    return JSONResponse(_error_body(found), found.status, headers)
