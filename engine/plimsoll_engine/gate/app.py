"""The gate's HTTP side: what is admitted, what is passed through, and every error in vLLM's shape.

In: clients' requests. Out: the upstream's answers byte for byte, or a refusal. Only listed routes
exist: one that generates by another name would pass the limits by.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from plimsoll_engine.admission import RefusalReason, Refused
from plimsoll_engine.gate.demand import Demand, limit_output, read_chat, read_completion
from plimsoll_engine.gate.gate import Gate
from plimsoll_engine.gate.metrics import own_page
from plimsoll_engine.server.errors import SERVER_FAILED, ApiError, refused

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
PAGE_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
_READERS: Mapping[str, Callable[[bytes], Demand]] = {CHAT: read_chat, COMPLETION: read_completion}
# They generate nothing.
_PASSED = (
    ("GET", "/v1/models"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)
_OPEN = frozenset({"/health", "/ping", "/gate/health", "/metrics", "/version"})


class GateApp:
    """Call it with a request, as ``aiohttp.web.Server`` does."""

    def __init__(self, gate: Gate, *, max_body: int, api_key: str | None = None) -> None:
        self.terminating = False
        self._gate = gate
        self._max_body = max_body
        self._api_key = None if api_key is None else f"Bearer {api_key}".encode()
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", CHAT): self._generate,
            ("POST", COMPLETION): self._generate,
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("POST", "/ping"): self._health,
            ("GET", "/gate/health"): self._own_health,
            ("GET", "/metrics"): self._metrics,
            **dict.fromkeys(_PASSED, self._pass_through),
        }
        self._paths = {path for _, path in self._handlers}

    async def __call__(self, http: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._find(http)(http)
        except ApiError as error:
            if error.status in (502, 503):
                self._gate.refused[RefusalReason.ENGINE_DEAD] += 1
            return _error_response(error)
        except Refused as refusal:
            return _error_response(refused(refusal))
        except (web.HTTPException, ConnectionError):
            raise
        except Exception:
            log.exception("%s %s failed", http.method, http.path)
            return _error_response(ApiError(500, SERVER_FAILED))

    def _find(self, http: web.BaseRequest) -> Handler:
        path = http.path
        self._check_key(http, path)
        if handler := self._handlers.get((http.method, path)):
            return handler
        if path in self._paths:
            raise ApiError(405, f"{http.method} is not allowed for {path}")
        raise ApiError(404, f"{path} is not served here: its length could not be admitted")

    def _check_key(self, http: web.BaseRequest, path: str) -> None:
        if self._api_key is None or path in _OPEN:
            return
        given = http.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._api_key):
            raise ApiError(401, "Unauthorized", headers={"WWW-Authenticate": "Bearer"})

    async def _generate(self, http: web.BaseRequest) -> web.StreamResponse:
        path = http.path
        body = await self._read(http)
        demand = _READERS[path](body)
        async with self._gate.place(demand, http.headers) as max_tokens:
            if max_tokens is not None:
                body = limit_output(body, max_tokens, chat=path == CHAT)
            return await self._gate.upstream.relay(http, path, body)

    async def _pass_through(self, http: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(http) if http.method == "POST" else None
        return await self._gate.upstream.relay(http, http.path, body)

    async def _health(self, http: web.BaseRequest) -> web.StreamResponse:
        """200 while requests can be served: by the gate and by the upstream. The body is empty, as
        vLLM's is."""
        healthy = not self.terminating and await self._gate.upstream.is_healthy()
        return web.Response(status=200 if healthy else 503)

    async def _own_health(self, http: web.BaseRequest) -> web.StreamResponse:
        """For the liveness of the gate, which does not end with an upstream that loads."""
        return web.Response(status=200)

    async def _metrics(self, http: web.BaseRequest) -> web.StreamResponse:
        try:
            page = await self._gate.upstream.metrics_page()
        except ApiError as error:
            log.info("no metrics of the upstream: %s", error.message)
            page = ""
        if page and not page.endswith("\n"):
            page += "\n"
        page += own_page(self._gate)
        return web.Response(body=page.encode(), headers={"Content-Type": PAGE_TYPE})

    async def _read(self, http: web.BaseRequest) -> bytes:
        if http.headers.get("Content-Encoding", "identity") != "identity":
            raise ApiError(415, "Content-Encoding is not allowed; expected a plain body")
        too_large = ApiError(413, f"The request has more than {self._max_body} bytes")
        if (http.content_length or 0) > self._max_body:
            raise too_large
        if http.headers.get("Expect", "").lower() == "100-continue":
            # curl waits for it with a long body.
            await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            http.writer.output_size = 0
        body = bytearray()
        while chunk := await http.content.readany():
            body += chunk
            if len(body) > self._max_body:
                raise too_large
        return bytes(body)


def _error_response(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(error.document()),
        content_type="application/json",
        headers=error.headers,
    )
