"""A small HTTP server that behaves as an engine would, by script: for tests of its clients.

In:  what to answer to each chat in turn, the text of /metrics, whether it is healthy.
Out: a base URL on loopback, and the requests it saw.

It speaks the engine's HTTP alone. Nothing is computed: an answer is the number of tokens asked for.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from aiohttp import web


@dataclass(frozen=True)
class Answer:
    """Streams (or returns) `text` token by token and finishes."""

    text: str = "Paris ."
    delay_s: float = 0.0


@dataclass(frozen=True)
class Refuse:
    """HTTP 429; `retry_after` is the header's value, None leaves the header out."""

    retry_after: str | None = "0"


@dataclass(frozen=True)
class TooLong:
    """HTTP 400 in vLLM's form."""


@dataclass(frozen=True)
class Break:
    """HTTP 500 before anything was streamed."""


@dataclass(frozen=True)
class Drop:
    """The connection is lost after `chunks` chunks."""

    chunks: int = 1


@dataclass(frozen=True)
class EndEarly:
    """The stream ends properly but without a finish reason."""


Behaviour = Answer | Refuse | TooLong | Break | Drop | EndEarly


def build_error(status: int, kind: str, message: str) -> dict[str, Any]:
    """vLLM's error body."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


class FakeEngine:
    """`async with FakeEngine([...]) as engine:`; the last behaviour repeats."""

    def __init__(
        self,
        script: Sequence[Behaviour] = (Answer(),),
        *,
        metrics: str = "",
        model: str = "fake",
        max_model_len: int = 4096,
    ) -> None:
        self.metrics = metrics
        self.healthy = True
        self.seen: list[dict[str, Any]] = []
        self._script = list(script)
        self._model = model
        self._max_model_len = max_model_len
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics, content_type="text/plain")

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self._model, "object": "model", "max_model_len": self._max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        behaviour = self._script[min(len(self.seen), len(self._script) - 1)]
        self.seen.append(body)
        match behaviour:
            case Refuse(retry_after):
                headers = {} if retry_after is None else {"Retry-After": retry_after}
                error = build_error(429, "RateLimitError", "over the admitted length now")
                return web.json_response(error, status=429, headers=headers)
            case TooLong():
                message = f"This model's maximum context length is {self._max_model_len} tokens."
                error = build_error(400, "BadRequestError", message)
                return web.json_response(error, status=400)
            case Break():
                error = build_error(500, "InternalServerError", "the engine is gone")
                return web.json_response(error, status=500)
            case Answer(text, delay_s):
                await asyncio.sleep(delay_s)
                if not body.get("stream"):
                    return web.json_response(self._completion(text))
                return await self._stream(request, text.split(" "), finish=True)
            case Drop(chunks):
                return await self._stream(request, ["word"] * chunks, finish=False, drop=True)
            case EndEarly():
                return await self._stream(request, ["word"], finish=False)

    def _completion(self, text: str) -> dict[str, Any]:
        return {
            "id": "chatcmpl-fake",
            "object": "chat.completion",
            "created": 0,
            "model": self._model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "stop",
                }
            ],
        }

    def _chunk(self, delta: dict[str, str], finish_reason: str | None) -> bytes:
        chunk = {
            "id": "chatcmpl-fake",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": self._model,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
        }
        return f"data: {json.dumps(chunk)}\n\n".encode()

    async def _stream(
        self, request: web.Request, tokens: Sequence[str], *, finish: bool, drop: bool = False
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(self._chunk({"role": "assistant"}, None))
        for token in tokens:
            await response.write(self._chunk({"content": token}, None))
        if drop:
            assert request.transport is not None
            request.transport.abort()
            return response
        if finish:
            await response.write(self._chunk({}, "length"))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
