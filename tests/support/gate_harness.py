"""A gate before a scripted upstream, both on the test's event loop, over real sockets.

``Upstream.held`` gives each generation that has arrived there; nothing answers it but the test.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from plimsoll_engine.gate.app import CHAT, COMPLETION, GateApp
from plimsoll_engine.gate.config import GateConfig
from plimsoll_engine.gate.counter import TokenCounter
from plimsoll_engine.gate.gate import Gate
from plimsoll_engine.gate.process import build_runner, read_limits
from plimsoll_engine.gate.upstream import Upstream as Connection

SECONDS = 20
PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",gpu_memory_utilization="0.9",num_gpu_blocks="100"} 1.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
"""


async def until(condition: Callable[[], bool]) -> None:
    """Lets everything else on the loop run until ``condition`` holds."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 (the gate has no event for each state)
            await asyncio.sleep(0)


@dataclass(eq=False)
class Held:
    """One generation at the upstream."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes
    answer: asyncio.Future[Callable[[web.Request], Any]]
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    def answer_json(self, document: Any = None) -> None:
        async def send(http: web.Request) -> web.StreamResponse:
            return web.json_response({"ok": True} if document is None else document)

        self.answer.set_result(send)


@dataclass
class Upstream:
    max_model_len: int = 1000
    # What /tokenize answers: a count, or a whole response.
    count: Callable[[dict[str, Any]], int | web.Response] = lambda asked: len(
        asked.get("prompt") or json.dumps(asked["messages"])
    )
    page: str = PAGE
    healthy: bool = True
    # Answers at once when set.
    send: Callable[[web.Request], Any] | None = None
    questions: list[dict[str, Any]] = field(default_factory=list)
    held: asyncio.Queue[Held] = field(default_factory=asyncio.Queue)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_post("/tokenize", self._tokenize)
        for path in (CHAT, COMPLETION):
            app.router.add_post(path, self._generate)
        return app

    async def _models(self, http: web.Request) -> web.Response:
        entry = {"id": "m", "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [entry]})

    async def _metrics(self, http: web.Request) -> web.Response:
        return web.Response(text=self.page)

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _version(self, http: web.Request) -> web.Response:
        return web.json_response({"version": "0.27.1"})

    async def _tokenize(self, http: web.Request) -> web.Response:
        asked = await http.json()
        self.questions.append(asked)
        count = self.count(asked)
        return count if isinstance(count, web.Response) else web.json_response({"count": count})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        answer = asyncio.get_running_loop().create_future()
        held = Held(http.path, list(http.headers.items()), await http.read(), answer)
        self.held.put_nowait(held)
        if self.send is not None:
            return await self.send(http)  # type: ignore[no-any-return]
        try:
            return await (await answer)(http)  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            held.left.set()
            raise


@dataclass(frozen=True)
class Harness:
    url: str
    gate: Gate
    app: GateApp
    upstream: Upstream
    client: aiohttp.ClientSession

    async def post(self, path: str, document: Any, **options: Any) -> tuple[int, Any]:
        """Status and JSON answer."""
        async with self.client.post(self.url + path, json=document, **options) as answer:
            return answer.status, await answer.json()

    def complete(self, prompt: Any, max_tokens: int | None = 10, **more: Any) -> asyncio.Task[Any]:
        """A completion on its way."""
        document = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, **more}
        return asyncio.create_task(self.post(COMPLETION, document))

    async def next(self) -> Held:
        async with asyncio.timeout(SECONDS):
            return await self.upstream.held.get()


@asynccontextmanager
async def serve(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        yield await _listen(runner)
    finally:
        await runner.cleanup()


@asynccontextmanager
async def open_gate(
    upstream: Upstream | None = None, *, at: str | None = None, **flags: Any
) -> AsyncIterator[Harness]:
    """``at``: the address of another upstream than the scripted one."""
    upstream = upstream or Upstream()
    async with serve(upstream.app()) as address:
        config = GateConfig(upstream=at or address, **flags)
        connection = Connection(config.upstream, api_key=config.api_key)
        gate = Gate(
            connection,
            TokenCounter(connection, None),
            read_limits(config),
            max_model_len=config.max_model_len,
            max_waiting=config.max_num_queued_reqs,
            max_waiting_tokens=config.max_num_queued_tokens,
        )
        app = GateApp(gate, max_body=config.max_body, api_key=config.api_key)
        runner = build_runner(app)
        await runner.setup()
        async with connection, aiohttp.ClientSession() as client:
            try:
                await gate.observe()
                yield Harness(await _listen(runner), gate, app, upstream, client)
            finally:
                await client.close()
                await runner.cleanup()


@asynccontextmanager
async def raw_server(answer: bytes, *, then_close: bool = True) -> AsyncIterator[str]:
    """Sends ``answer`` to every request, whatever it is."""
    held: list[asyncio.StreamWriter] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if (mark := head.lower().find(b"content-length:")) >= 0:
            await reader.readexactly(int(head[mark + 15 :].split(b"\r\n")[0]))
        writer.write(answer)
        await writer.drain()
        held.append(writer)
        if then_close:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in held:
            writer.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def _listen(runner: web.BaseRunner) -> str:
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"
