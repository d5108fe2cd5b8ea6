"""What every HTTP exchange gets: an id of the request, and vLLM's ``http_*`` metrics.

In: ASGI messages. Out: the header ``X-Request-Id`` in each answer, the id in the scope, and series
whose number no client can raise.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plimsoll_engine.server.errors import ApiError, error_response

MAX_REQUEST_ID = 256
# Not counted, as in vLLM: they would drown the rest.
UNCOUNTED_PATHS = frozenset({"/metrics", "/health", "/ping", "/load", "/version"})
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Those of prometheus_fastapi_instrumentator, which vLLM uses.
DURATION_BUCKETS = (0.1, 0.5, 1)


class RequestIds:
    """The client's ``X-Request-Id``, or a new one, comes back in the answer's header. Handlers find
    it as ``request_id`` in the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        too_long = len(given) > MAX_REQUEST_ID
        request_id = uuid.uuid4().hex if too_long or not given else given.decode("latin-1")

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("latin-1")),
                ]
            await send(message)

        if too_long:
            error = ApiError(
                400,
                f"X-Request-Id: {len(given)} bytes are not allowed; expected at most "
                f"{MAX_REQUEST_ID}",
                param="X-Request-Id",
            )
            await error_response(error)(scope, receive, answer)
            return
        scope["request_id"] = request_id
        await self._app(scope, receive, answer)


class HttpMetrics:
    """``http_requests_total`` by handler, method and class of status, and how long they took."""

    def __init__(
        self, app: ASGIApp, *, registry: CollectorRegistry, paths: Collection[str]
    ) -> None:
        """``paths`` are the routes: anything else is the handler ``none``."""
        self._app = app
        self._paths = frozenset(paths)
        self._requests = Counter(
            "http_requests",
            "HTTP requests, by handler, method and class of status.",
            ("method", "status", "handler"),
            registry=registry,
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "From a request's head to the last byte of its answer.",
            ("handler", "method"),
            buckets=DURATION_BUCKETS,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNCOUNTED_PATHS:
            await self._app(scope, receive, send)
            return
        handler = scope["path"] if scope["path"] in self._paths else "none"
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        # What is left when nothing was answered.
        status, begun = 500, time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            self._requests.labels(method, f"{status // 100}xx", handler).inc()
            self._duration.labels(handler, method).observe(time.perf_counter() - begun)
