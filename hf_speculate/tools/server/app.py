"""FastAPI application with OpenAI's endpoints over an engine, and the server that runs it."""

import asyncio
import json
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from hf_speculate.tools.server.engine import DecodeRequest, DecodeResult, Engine, RequestError
from hf_speculate.tools.server.schemas import (
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    check_model,
    decode_request,
)

Answer = AsyncGenerator[str | DecodeResult, None]
_ANSWER_S = 5  # at a shutdown, for the error answers of the requests that were not finished


class _Form(NamedTuple):
    """JSON of an endpoint's answers: the names of its objects, and its choices."""

    id_prefix: str
    whole: str
    chunk: str
    is_chat: bool

    def choice(self, text: str, reason: str | None, is_delta: bool = False) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self.is_chat and is_delta:
            content = {"delta": {"content": text} if text else {}}
        elif self.is_chat:
            content = {"message": {"role": "assistant", "content": text}}
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


_CHAT = _Form("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)
_COMPLETION = _Form("cmpl", "text_completion", "text_completion", is_chat=False)


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
        return await _answer(engine, body, http, _CHAT)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Any:
        return await _answer(engine, body, http, _COMPLETION)

    _handle_errors(app)
    return app


class GracefulServer(uvicorn.Server):
    """Serves an engine; after `grace_s` seconds of a shutdown, requests in flight end with an error."""

    def __init__(self, engine: Engine, grace_s: float):
        timeout = int(grace_s) + _ANSWER_S
        super().__init__(uvicorn.Config(make_app(engine), log_level="warning", timeout_graceful_shutdown=timeout))
        self._engine, self._grace_s = engine, grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server.shutdown`."""
        asyncio.get_running_loop().call_later(self._grace_s, self._engine.end_requests)
        await super().shutdown(sockets)


async def _answer(engine: Engine, body: ChatRequest | CompletionRequest, http: Request, form: _Form) -> Any:
    request = decode_request(body, engine)
    answer = engine.stream(request, http.is_disconnected)
    head = {"id": f"{form.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": engine.name}
    if not body.stream:
        pieces = [piece async for piece in answer]
        if not pieces or isinstance(pieces[-1], str):
            return None  # the client has left
        text, result = "".join(map(str, pieces[:-1])), pieces[-1]
        choice, usage = form.choice(text, result.finish_reason), _usage(request, result)
        return {**head, "object": form.whole, "choices": [choice], "usage": usage}
    first = await anext(answer, None)  # an error of generate() is then an error response, not a broken stream
    if first is None:
        return None
    has_usage = body.stream_options is not None and body.stream_options.include_usage
    events = _events(answer, first, request, head | {"object": form.chunk}, form, has_usage)
    return StreamingResponse(events, media_type="text/event-stream")


async def _events(
    answer: Answer,
    first: str | DecodeResult,
    request: DecodeRequest,
    head: dict[str, Any],
    form: _Form,
    has_usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events of an answer whose first piece is known."""

    def event(*choices: dict[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    async with aclosing(answer):
        if form.is_chat:
            yield event(form.choice("", None, is_delta=True) | {"delta": {"role": "assistant", "content": ""}})
        piece: str | DecodeResult | None = first
        try:
            while isinstance(piece, str):
                yield event(form.choice(piece, None, is_delta=True))
                piece = await anext(answer, None)
        except RequestError as error:  # the status is sent already
            yield f"data: {json.dumps(_error_body(error))}\n\n"
            return
        if piece is None:
            return
        yield event(form.choice("", piece.finish_reason, is_delta=True))
        if has_usage:
            yield event(usage=_usage(request, piece))
        yield "data: [DONE]\n\n"


def _usage(request: DecodeRequest, result: DecodeResult) -> dict[str, Any]:
    """OpenAI's counts, and statistics of speculative decoding."""
    num_prompt, num_new = len(request.token_ids), result.num_new_tokens
    num_in_rounds = num_new - 1  # the first token follows the prompt
    speculation = {
        "rounds": result.num_rounds,
        "acceptance_rate": round(result.num_accepted / max(result.num_drafted, 1), 4),
        "mean_acceptance_length": round(num_in_rounds / max(result.num_rounds, 1), 4),
    }
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    return {**counts, "speculation": speculation}


def _error_body(error: RequestError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "rate_limit_error" if error.status == 429 else kind
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def _handle_errors(app: FastAPI) -> None:
    """Answer errors in OpenAI's form."""

    def response(error: RequestError) -> JSONResponse:
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(_error_body(error), error.status, headers)

    @app.exception_handler(RequestError)
    async def not_answered(_: Request, error: RequestError) -> JSONResponse:
        return response(error)

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        message = f"{param}: {first['msg']}"
        if first["type"] == "extra_forbidden" and param in NEUTRAL:
            values = " or ".join(map(json.dumps, NEUTRAL[param]))
            message = f"{param} must be {values}, got {json.dumps(first['input'])}; other values are not supported"
        return response(RequestError(message, param or None))

    @app.exception_handler(HTTPException)
    async def not_found(_: Request, error: HTTPException) -> JSONResponse:
        return response(RequestError(str(error.detail), status=error.status_code))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return response(RequestError(f"{type(error).__name__}: {error}", status=500))
