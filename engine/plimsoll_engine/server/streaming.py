"""Work that ends when its client goes away, and server-sent events built on it.

uvicorn tells of a lost connection only to who listens for it, and a request may wait in the queue
for a long time without sending a byte: so somebody listens, in every state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


async def until_disconnect(receive: Receive, work: Coroutine[None, None, Result]) -> Result:
    """Runs ``work``; cancels it and raises ClientDisconnect when the client is gone first."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, listening = asyncio.create_task(work), asyncio.create_task(listen())
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


class EventStream(Response):
    """Sends ``events`` and leaves ``resource`` (already entered) whatever happens."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], resource: AbstractAsyncContextManager[object]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The length is not known in advance.
        del self.headers["content-length"]
        self._events = events
        self._resource = resource

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(send))
        except (ClientDisconnect, OSError):
            # Nobody is left to tell.
            pass
        finally:
            await self._resource.__aexit__(None, None, None)

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
