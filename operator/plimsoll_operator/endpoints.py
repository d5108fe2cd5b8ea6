"""What kubelet and Prometheus ask the operator: /healthz, /readyz and /metrics.

In: the state of this process. Out: HTTP. /healthz is 200 while the event loop turns; /readyz is 200
for the leader and for a standby, and says which; before either is known it is 503.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from plimsoll_operator.telemetry import Telemetry


@dataclass(frozen=True)
class Readiness:
    ready: bool
    message: str


@asynccontextmanager
async def serve(
    port: int, telemetry: Telemetry, readiness: Callable[[], Readiness]
) -> AsyncIterator[None]:
    """Raises OSError when the port is taken."""

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(request: web.Request) -> web.Response:
        answer = readiness()
        return web.Response(text=f"{answer.message}\n", status=200 if answer.ready else 503)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=telemetry.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes(
        [web.get("/healthz", health), web.get("/readyz", ready), web.get("/metrics", metrics)]
    )
    runner = web.AppRunner(application, handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port).start()
        yield
    finally:
        await runner.cleanup()
