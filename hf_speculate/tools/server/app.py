"""FastAPI application with OpenAI's endpoints over an engine, and the server that runs it."""

import asyncio
import json
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing, asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from hf_speculate.options.refill.continuous import RowPrompt
from hf_speculate.tools.server.engine import DecodeResult, Engine
from hf_speculate.tools.server.errors import RequestError, error_body, request_error
from hf_speculate.tools.server.hosts import HostCheck
from hf_speculate.tools.server.intake import Intake
from hf_speculate.tools.server.schemas import AnswerFormat, ChatRequest, CompletionRequest, check_model

Answer = AsyncGenerator[str | DecodeResult, None]
# Begin of an answer's id, and names of a whole answer and of a chunk of a streamed one.
_CHAT_NAMES = ("chatcmpl", "chat.completion", "chat.completion.chunk")
_COMPLETION_NAMES = ("cmpl", "text_completion", "text_completion")
_ANSWER_S = 5  # at a shutdown, for the error answers of the requests that were not finished


class _App(FastAPI):
    """Describes requests in `/openapi.json`: the routes read them without FastAPI."""

    def openapi(self) -> dict[str, Any]:
        _, schemas = models_json_schema(
            [(ChatRequest, "validation"), (CompletionRequest, "validation")],
            ref_template="#/components/schemas/{model}",
        )
        return {**super().openapi(), "components": {"schemas": schemas["$defs"]}}


def _described(kind: type) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def make_app(engine: Engine, host_names: Collection[str] = ()) -> FastAPI:
    """Routes and error handlers over an engine, which is closed with the application.

    Args:
        engine: decodes the requests.
        host_names: names that requests may give to this machine besides localhost and IP addresses; "*" for all.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    # FastAPI's pages of documentation load scripts from elsewhere
    app = _App(title="hf_speculate", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(HostCheck, names=host_names)
    intake = Intake(engine)
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

    @app.post("/v1/chat/completions", openapi_extra=_described(ChatRequest))
    async def chat(http: Request) -> Any:
        return await _answer(engine, await intake.read(ChatRequest, http), http)

    @app.post("/v1/completions", openapi_extra=_described(CompletionRequest))
    async def completions(http: Request) -> Any:
        return await _answer(engine, await intake.read(CompletionRequest, http), http)

    for kind in (RequestError, HTTPException, Exception):
        app.add_exception_handler(kind, _error_response)
    return app


class GracefulServer(uvicorn.Server):
    """Serves an engine; after `grace_s` seconds of a shutdown, requests in flight end with an error."""

    def __init__(self, engine: Engine, grace_s: float, host_names: Collection[str] = ()):
        timeout, app = int(grace_s) + _ANSWER_S, make_app(engine, host_names)
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=timeout))
        self._engine, self._grace_s = engine, grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace_s, self._engine.end_requests)
        await super().shutdown(sockets)


async def _answer(engine: Engine, read: tuple[AnswerFormat, RowPrompt] | None, http: Request) -> Any:
    if read is None:
        return None  # the client has left
    form, prompt = read
    answer = engine.stream(prompt, http.is_disconnected)
    prefix, whole, chunk = _CHAT_NAMES if form.is_chat else _COMPLETION_NAMES
    head: dict[str, Any] = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": chunk if form.is_streamed else whole}
    head |= {"created": int(time.time()), "model": engine.name}
    if not form.is_streamed:
        pieces = [piece async for piece in answer]
        if not pieces or isinstance(pieces[-1], str):
            return None
        text, result = "".join(map(str, pieces[:-1])), pieces[-1]
        return {**head, "choices": [_choice(form, text, result.finish_reason)], "usage": _usage(result)}
    first = await anext(answer, None)  # an error of generate() is then an error response, not a broken stream
    if first is None:
        return None
    return StreamingResponse(_events(answer, first, head, form), media_type="text/event-stream")


async def _events(
    answer: Answer, first: str | DecodeResult, head: dict[str, Any], form: AnswerFormat
) -> AsyncIterator[str]:
    """Server-sent events of an answer whose first piece is known."""

    def event(*choices: dict[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    async with aclosing(answer):
        if form.is_chat:
            yield event(_choice(form) | {"delta": {"role": "assistant", "content": ""}})
        piece: str | DecodeResult | None = first
        try:
            while isinstance(piece, str):
                yield event(_choice(form, piece))
                piece = await anext(answer, None)
        except RequestError as error:  # the status is sent already
            yield f"data: {json.dumps(error_body(error))}\n\n"
            return
        if piece is None:
            return
        yield event(_choice(form, reason=piece.finish_reason))
        if form.has_usage:
            yield event(usage=_usage(piece))
        yield "data: [DONE]\n\n"


def _choice(form: AnswerFormat, text: str = "", reason: str | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"text": text}
    if form.is_chat:
        delta = {"delta": {"content": text} if text else {}}
        content = delta if form.is_streamed else {"message": {"role": "assistant", "content": text}}
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


async def _error_response(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        error = RequestError(str(error.detail), status=error.status_code)
    found = error if isinstance(error, RequestError) else request_error(error)
    headers = {"Retry-After": "1"} if found.status == 429 else None
    return JSONResponse(error_body(found), found.status, headers)
