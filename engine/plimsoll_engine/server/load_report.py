"""The engine's load in the head of an answer, for balancers that ask for it (ORCA, as vLLM has it).

In: the header ``endpoint-load-metrics-format`` of a request that generates, ``TEXT`` or ``JSON`` in any
case. Out: ``endpoint-load-metrics`` in its answer, when that is 200: the load at the answer's head, so
at the end of a whole one and at the start of a stream. Any other format gets no report, and no error:
a balancer writes it, not the client.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plimsoll_engine.reports import EngineSnapshot

FORMAT_HEADER = b"endpoint-load-metrics-format"
REPORT_HEADER = b"endpoint-load-metrics"


class LoadReports:
    def __init__(
        self, app: ASGIApp, *, paths: Collection[str], snapshot: Callable[[], EngineSnapshot]
    ) -> None:
        """``paths`` are those that generate."""
        self._app = app
        self._paths = frozenset(paths)
        self._snapshot = snapshot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = None
        if scope["type"] == "http" and scope["path"] in self._paths:
            asked = dict(scope["headers"]).get(FORMAT_HEADER)
        if asked is None:
            await self._app(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                report = write_report(asked.decode("latin-1"), self._snapshot())
                if report is not None:
                    message["headers"] = [
                        *message.get("headers", ()),
                        (REPORT_HEADER, report.encode()),
                    ]
            await send(message)

        await self._app(scope, receive, answer)


def write_report(form: str, snapshot: EngineSnapshot) -> str | None:
    metrics = {
        "kv_cache_usage_perc": snapshot.kv_cache_usage,
        "num_requests_waiting": float(snapshot.waiting),
    }
    match form.lower():
        case "text":
            named = (f"named_metrics.{name}={value}" for name, value in metrics.items())
            return f"TEXT {', '.join(named)}"
        case "json":
            return f"JSON {msgspec.json.encode({'named_metrics': metrics}).decode()}"
        case _:
            return None
