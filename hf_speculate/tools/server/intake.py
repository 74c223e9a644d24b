"""Intake: read the bodies of requests into prompts, within limits and off the event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import Request as HttpRequest
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from hf_speculate.tools.server.answers import Asked, asked_of
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.errors import RequestError, busy_error
from hf_speculate.tools.server.prompts import grammar_source
from hf_speculate.tools.server.response_format import GrammarSource
from hf_speculate.tools.server.schemas import AnyRequest, parse

# bytes per character of a long text: mostly ASCII, some characters escaped by JSON
_BYTES_PER_CHAR = 2
_OTHER_BYTES = 65_536  # bytes of a body besides the text
# bytes of a body for any context length: parsing 32 MiB of JSON takes up to two seconds
_MAX_BYTES = 2**25
_LONG_BYTES = 65_536  # tokenising a longer text takes more than about 0.1 s
# seconds to read a rejected body: many clients send all of it before they read the answer
_DISCARD_S = 1.0


class Intake:
    """Reader of requests, within limits.

    Long texts are read one after another, and so are short texts beside them. The total bytes of
    bodies before tokenisation are limited too. This bounds the memory.
    """

    def __init__(self, engine: Engine):
        self.max_bytes = min(_BYTES_PER_CHAR * engine.max_chars + _OTHER_BYTES, _MAX_BYTES)
        self._max_held_bytes = (engine.num_rows + engine.max_queued) * self.max_bytes
        self._engine, self._num_held_bytes = engine, 0
        self._short, self._long, self._grammars = (asyncio.Semaphore(1) for _ in range(3))

    async def read(self, kind: type[AnyRequest], http: HttpRequest) -> Asked | None:
        """Read and translate a request; None if the client disconnects."""
        chunks = http.stream()
        try:
            self._engine.check_room()
            async with self._body(http.headers, chunks) as body:
                turn = self._long if len(body) > _LONG_BYTES else self._short
                async with turn:
                    if await http.is_disconnected():
                        return None
                    request = await asyncio.to_thread(parse, kind, body)
                    source = await asyncio.to_thread(grammar_source, request, self._engine)
                grammar = None
                if source is not None:
                    # Other requests go on meanwhile: compiling takes up to `GrammarLimits.seconds`.
                    async with self._grammars:
                        if await http.is_disconnected():
                            return None
                        grammar = await self._compile(source)
                async with turn:
                    if await http.is_disconnected():
                        return None
                    return await asyncio.to_thread(asked_of, request, self._engine, grammar)
        except ClientDisconnect:
            return None
        except RequestError:
            if "expect" not in http.headers:
                with suppress(ClientDisconnect, TimeoutError):
                    async with asyncio.timeout(_DISCARD_S):
                        async for _ in chunks:
                            pass
            raise

    async def _compile(self, source: GrammarSource) -> Any:
        """Compile a grammar in the thread for grammars."""
        grammars, loop = self._engine.grammars, asyncio.get_running_loop()
        return await loop.run_in_executor(grammars.thread, grammars.compile, source)

    @asynccontextmanager
    async def _body(
        self, headers: Headers, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytearray]:
        """Read the body; its bytes count as held until the context ends."""
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise RequestError(
                f"Content-Type must be application/json, got {media_type!r}", status=415
            )
        length = headers.get("content-length")
        if length is not None and int(length) > self.max_bytes:
            raise self._too_large(length)
        body = bytearray()
        try:
            async for chunk in chunks:
                if len(body) + len(chunk) > self.max_bytes:
                    raise self._too_large("more")
                if self._num_held_bytes + len(chunk) > self._max_held_bytes:
                    raise busy_error(
                        "the texts of all requests have too many bytes; try again later"
                    )
                self._num_held_bytes += len(chunk)
                body += chunk
            yield body
        finally:
            self._num_held_bytes -= len(body)

    def _too_large(self, got: str) -> RequestError:
        return RequestError(
            f"a body must have at most {self.max_bytes} bytes, got {got}; send less text",
            code="request_too_large",
            status=413,
        )
