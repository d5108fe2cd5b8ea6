"""The HTTP socket and the uvicorn server on it.

The port is taken at the very start, so that a port in use is told before a model is loaded; nobody
can connect until ``serve`` listens on it. Signals are the process's business, not uvicorn's.
"""

from __future__ import annotations

import logging
import socket
from contextlib import AbstractContextManager, nullcontext

import uvicorn
from starlette.types import ASGIApp

from plimsoll_engine.config import ConfigError

log = logging.getLogger(__name__)

# Requests have been drained when the server is told to exit; this is for their last bytes.
LAST_BYTES_SECONDS = 2


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("--host", host, f"an address of this machine ({error})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            "--port", f"{host}:{port}", f"an address and port that are free ({error.strerror})"
        ) from None
    return listener


class HttpServer(uvicorn.Server):
    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=LAST_BYTES_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            log.info("serving on http://%s:%d", host, port)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()
