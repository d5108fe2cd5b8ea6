"""The HTTP socket and the uvicorn server on it.

The port is taken at the very start, so that a port in use is told before a model is loaded; nobody
can connect until the server listens on it. Signals are the process's business, not uvicorn's.
"""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from plimsoll_engine.config import ConfigError
from plimsoll_engine.server.connections import BoundedConnection, ConnectionBounds

log = logging.getLogger(__name__)

# Requests have been drained when the server is told to exit; this is for their last bytes.
LAST_BYTES_SECONDS = 2
# Connections not yet accepted; uvicorn's own figure.
BACKLOG = 2048


def bind(host: str, port: int, *, flag: str = "--port") -> socket.socket:
    """A socket that is bound, alone on its port, and does not listen.

    ``flag`` is the setting that the port is from. Raises ConfigError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    # UnicodeError: a name with an empty label or one above 63 characters.
    except (OSError, UnicodeError) as error:
        raise ConfigError("--host", host, f"an address of this machine ({error})") from None
    try:
        _bind_alone(listener, address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            allowed = f"an address of this machine ({error.strerror})"
            raise ConfigError("--host", host, allowed) from None
        raise _not_free(flag, host, port, error) from None
    return listener


def listen(listener: socket.socket) -> None:
    """Raises ConfigError when somebody else has come to listen on the port."""
    # Connections inherit it: without it those that linger in TIME_WAIT keep the next engine out.
    _set_reuse(listener, True)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _not_free("--port", host, port, error) from None


def _bind_alone(listener: socket.socket, address: Any) -> None:
    """With SO_REUSEADDR two sockets may be bound to one port while neither listens, and the second
    would learn of it after a whole load only. So it is set for the moment of the bind alone, and
    only when something is in the way, which may be no more than a connection in TIME_WAIT."""
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        _set_reuse(listener, True)
        listener.bind(address)
        _set_reuse(listener, False)


def _set_reuse(listener: socket.socket, value: bool) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, value)


def _not_free(flag: str, host: str, port: int, error: OSError) -> ConfigError:
    allowed = f"an address and port that are free ({error.strerror})"
    return ConfigError(flag, f"{host}:{port}", allowed)


class HttpServer(uvicorn.Server):
    def __init__(self, app: ASGIApp, bounds: ConnectionBounds | None = None) -> None:
        bounds = bounds or ConnectionBounds()
        protocol = type("Connection", (BoundedConnection,), {"bounds": bounds})
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=bounds.idle_seconds,
                timeout_graceful_shutdown=LAST_BYTES_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises ConfigError."""
        for listener in sockets or []:
            listen(listener)
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            log.info("serving on http://%s:%d", host, port)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()
