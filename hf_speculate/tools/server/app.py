"""FastAPI application with OpenAI's endpoints for an engine, and its server."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from hf_speculate.errors import MissingExtraError
from hf_speculate.tools.server.answers import Asked, events, whole_answer
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.errors import RequestError, error_body, request_error
from hf_speculate.tools.server.fair_reading import FairProtocol
from hf_speculate.tools.server.hosts import HostCheck
from hf_speculate.tools.server.intake import Intake
from hf_speculate.tools.server.metrics import Metrics, RequestTimer
from hf_speculate.tools.server.page import chat_page, page_headers
from hf_speculate.tools.server.prompts import check_model
from hf_speculate.tools.server.schemas import AnyRequest, ChatRequest, CompletionRequest

_ANSWER_S = 5  # seconds for sending errors to unfinished requests at shutdown


class _App(FastAPI):
    """FastAPI application with the schemas of requests.

    The routes read requests without FastAPI, so their schemas are added to `/openapi.json` here.
    """

    def openapi(self) -> dict[str, Any]:
        _, schemas = models_json_schema(
            [(ChatRequest, "validation"), (CompletionRequest, "validation")],
            ref_template="#/components/schemas/{model}",
        )
        return {**super().openapi(), "components": {"schemas": schemas["$defs"]}}


def _described(kind: type) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def make_app(engine: Engine, host_names: Collection[str] = (), has_page: bool = True) -> FastAPI:
    """Make the application for an engine, with routes and error handlers.

    Args:
        engine: decodes the requests; it is closed together with the application.
        host_names: names of this machine to accept in requests, besides localhost and IP addresses;
            "*" for all.
        has_page: whether `/` serves a page for chatting with the model.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    # FastAPI's documentation pages load scripts from other servers.
    app = _App(title="hf_speculate", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(HostCheck, names=host_names)
    intake, metrics = Intake(engine), _metrics_of(engine)
    model = {
        "id": engine.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "hf_speculate",
    }

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "running": engine.num_running, "waiting": engine.num_waiting}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def served_model(name: str) -> dict[str, Any]:
        check_model(name, engine)
        return model

    @app.get("/metrics")
    async def metrics_text() -> Response:
        if isinstance(metrics, MissingExtraError):
            raise RequestError(str(metrics), status=501)
        return Response(metrics.text(), media_type=metrics.media_type)

    async def answer(kind: type[AnyRequest], http: Request) -> Any:
        with RequestTimer(
            None if isinstance(metrics, MissingExtraError) else metrics.add_request
        ) as timer:
            return await _answer(engine, await intake.read(kind, http), http, timer)

    @app.post("/v1/chat/completions", openapi_extra=_described(ChatRequest))
    async def chat(http: Request) -> Any:
        return await answer(ChatRequest, http)

    @app.post("/v1/completions", openapi_extra=_described(CompletionRequest))
    async def completions(http: Request) -> Any:
        return await answer(CompletionRequest, http)

    if has_page:
        html = chat_page(engine.name)

        @app.get("/", include_in_schema=False)
        async def page() -> HTMLResponse:
            return HTMLResponse(html, headers=page_headers(html))

    for error_type in (RequestError, HTTPException, Exception):
        app.add_exception_handler(error_type, _error_response)
    return app


class GracefulServer(uvicorn.Server):
    """HTTP server for an engine.

    Requests that are still in flight `grace_s` seconds after the start of a shutdown end with an
    error.
    """

    def __init__(
        self,
        engine: Engine,
        grace_s: float,
        host_names: Collection[str] = (),
        has_page: bool = True,
    ):
        timeout, app = int(grace_s) + _ANSWER_S, make_app(engine, host_names, has_page)
        super().__init__(
            uvicorn.Config(
                app, http=FairProtocol, log_level="warning", timeout_graceful_shutdown=timeout
            )
        )
        self._engine, self._grace_s = engine, grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace_s, self._engine.end_requests)
        await super().shutdown(sockets)


def _metrics_of(engine: Engine) -> Metrics | MissingExtraError:
    try:
        return Metrics(engine)
    except MissingExtraError as error:
        return error


async def _answer(engine: Engine, asked: Asked | None, http: Request, timer: RequestTimer) -> Any:
    if asked is None:
        timer.end("cancelled")
        return None  # the client has disconnected
    pieces = timer.follow(engine.stream(asked.texts, http.is_disconnected), len(asked.texts))
    head = asked.head(engine.name)
    if not asked.is_streamed:
        return await whole_answer(asked, pieces, head)
    # An error from generate() becomes an error response instead of a broken stream.
    first = await anext(pieces, None)
    if first is None:
        return None
    return StreamingResponse(events(asked, pieces, first, head), media_type="text/event-stream")


async def _error_response(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        error = RequestError(str(error.detail), status=error.status_code)
    answered = error if isinstance(error, RequestError) else request_error(error)
    headers = {"Retry-After": "1"} if answered.status == 429 else None
    return JSONResponse(error_body(answered), answered.status, headers)
