"""`hf-speculate serve`: answer requests in OpenAI's format over HTTP."""

import importlib
import signal
import socket
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from typing import Any

from hf_speculate.errors import ConfigError, import_extra
from hf_speculate.tools.cli.arguments import drafting_of
from hf_speculate.tools.cli.console import OK, note
from hf_speculate.tools.cli.loading import load_pair, with_named_target
from hf_speculate.tools.cli.options import Serve
from hf_speculate.tools.cli.store import lookup_of, open_store
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.response_format import GrammarLimits

_GRACE_S = 10  # seconds for requests in flight after Ctrl-C or SIGTERM


def run(options: Serve) -> int:
    fields = lookup_of(options) | drafting_of(options)

    def load() -> Engine:
        models = with_named_target(options)
        stored = closing.enter_context(open_store(models))
        pair, name = load_pair(models), options.name or models.target
        grammars = GrammarLimits(
            options.grammar_seconds, options.max_schema_bytes, options.grammar_memory_bytes
        )
        return Engine(
            pair.target,
            pair.tokenizer,
            name,
            pair.arguments | fields | stored,
            num_rows=options.rows,
            max_queued=options.max_queued,
            max_cache_tokens=options.max_cache_tokens,
            grammar_limits=grammars,
        )

    with ExitStack() as closing:
        return serve(load, options.host, options.port, options.allowed_hosts or (), options.page)


def serve(
    load: Callable[[], Engine],
    host: str,
    port: int,
    allowed_hosts: Collection[str] = (),
    has_page: bool = True,
) -> int:
    """Check packages and the port, then load an engine and serve it.

    Args:
        load: loads the engine.
        host: address to listen on.
        port: port to listen on; 0 for any free port.
        allowed_hosts: further names of this machine to accept in requests.
        has_page: whether to serve a chat page at /.
    """
    for package in ("fastapi", "uvicorn"):
        import_extra(package, "serve")
    app: Any = importlib.import_module("hf_speculate.tools.server.app")
    with _listen(host, port) as listener:
        engine = load()
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        rows = (
            f"{engine.num_rows} requests at once"
            if engine.num_rows > 1
            else "one request at a time"
        )
        reason = f" ({engine.obstacle})" if engine.obstacle else ""
        page = f"; chat page on {address}/" if has_page else ""
        note(f"serving {engine.name} on {address}/v1, {rows}{reason}{page}; Ctrl-C stops", style="")
        try:
            if threading.current_thread() is threading.main_thread():
                # uvicorn raises the signal again after its shutdown
                signal.signal(signal.SIGTERM, lambda *_: None)
            with suppress(KeyboardInterrupt):
                server = app.GracefulServer(engine, _GRACE_S, (host, *allowed_hosts), has_page)
                server.run(sockets=[listener])
            note("stopped", style="")
        finally:
            engine.close()
    return OK


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--host and --port must be free on this machine, got {host} and {port} ({error}); "
            "choose another port"
        ) from error
