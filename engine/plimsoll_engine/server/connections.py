"""HTTP connections that cannot be held open for nothing: uvicorn's, with bounds.

uvicorn waits for ever for the head of a request and for a client that does not read. Here a head
has a deadline, a client that takes nothing is dropped, one that is gone without a word is found by
TCP keepalive, and the number of connections is bounded: when all places are taken, a new connection
gets the place of the one that has been without a request the longest. So probes come through
whoever holds connections open. Requests and their bodies are not known here.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from dataclasses import dataclass, field
from typing import cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from plimsoll_engine.server.errors import ApiError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
# File descriptors for everything else: the model, libraries, the control channel.
OTHER_DESCRIPTORS = 256
# A client that vanished is found after 30 + 3 x 10 seconds of silence.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES = 30, 10, 3


def connections_allowed() -> int:
    """As many as there are file descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, soft - OTHER_DESCRIPTORS))


@dataclass(frozen=True)
class ConnectionBounds:
    # From the connection, or a head's first byte, to its last.
    head_seconds: float = 20.0
    # From an answer to the first byte of the next request.
    idle_seconds: int = 5
    # In which a client must take what waits for it, once that is more than the buffer should hold.
    stalled_seconds: float = 60.0
    most: int = field(default_factory=connections_allowed)


class BoundedConnection(H11Protocol):
    bounds = ConnectionBounds()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._idle_since = self.loop.time()
        self._head_deadline: asyncio.TimerHandle | None = None
        self._stall_deadline: asyncio.TimerHandle | None = None
        full = len(self.connections) >= self.bounds.most
        super().connection_made(transport)
        _keep_alive(transport)
        if full and not self._take_place():
            log.warning("all %d connections are in use: one is refused", self.bounds.most)
            self._refuse(ApiError(503, "All connections are in use", headers={"Retry-After": "1"}))
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_deadline)
        _cancel(self._stall_deadline)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:
            _cancel(self._head_deadline)
            self._head_deadline = None
        elif self._head_deadline is None and not self.transport.is_closing():
            self._expect_head()

    @property
    def idle(self) -> bool:
        """Without a request, or with a part of its head."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        # Closing would wait for a client that takes nothing.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        super().pause_writing()
        _cancel(self._stall_deadline)
        self._stall_deadline = self.loop.call_later(
            self.bounds.stalled_seconds, self.transport.abort
        )

    def resume_writing(self) -> None:
        _cancel(self._stall_deadline)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, in the shape of all other errors."""
        self._refuse(ApiError(400, msg))

    def _expect_head(self) -> None:
        self._head_deadline = self.loop.call_later(self.bounds.head_seconds, self._give_up_head)

    def _give_up_head(self) -> None:
        self._refuse(
            ApiError(408, f"No request arrived within {self.bounds.head_seconds:g} seconds")
        )

    def _take_place(self) -> bool:
        others = cast("set[BoundedConnection]", self.connections - {self})
        idle = [each for each in others if each.idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each._idle_since)
        # Its place is free at once, whatever its client does.
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def _refuse(self, error: ApiError) -> None:
        """Tells the error where an answer may still begin, and closes."""
        if self.transport.is_closing():
            return
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = msgspec.json.encode(error.document())
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **error.headers,
        }
        for event in (
            h11.Response(status_code=error.status, headers=list(headers.items())),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            # None stands for a connection that is to be closed.
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _keep_alive(transport: asyncio.Transport) -> None:
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
