"""A uvicorn server that gives requests in flight some seconds when it stops."""

import asyncio
import socket

import uvicorn

from hf_speculate.tools.server.app import make_app
from hf_speculate.tools.server.engine import Engine

_ANSWER_S = 5  # for the error answers of the requests that were not finished


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
