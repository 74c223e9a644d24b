"""Host check against DNS rebinding, which rejects requests that name another machine."""

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hf_speculate.tools.server.errors import RequestError, error_body

_OPEN = {"0.0.0.0", "::"}


class HostCheck:
    """ASGI middleware that checks the Host header.

    Requests to `localhost`, to an IP address and to the `names` pass. All requests pass if the
    names contain "*", or contain only 0.0.0.0 and ::, the addresses of a server open to all.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]):
        given = {name.lower().rstrip(".") for name in names}
        self.app, self.names = app, {"localhost", *given}
        self._allows_all = "*" in given or (bool(given) and given <= _OPEN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_allowed(
            host := Headers(scope=scope).get("host", "")
        ):
            error = RequestError(
                "Host must be localhost, an IP address or a name that the server was given, got "
                f"{host[:100]!r}; start "
                "the server with --allowed-host and this name"
            )
            await JSONResponse(error_body(error), error.status)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = host.rpartition("]")[0].lstrip("[") or host.partition(":")[0].lower().rstrip(".")
        return self._allows_all or name in self.names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
