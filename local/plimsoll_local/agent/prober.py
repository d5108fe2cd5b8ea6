"""Keeps probing one running container, in the kubelet's order.

In: the container's probes. Out: calls when a verdict is reached. Liveness and readiness begin when the
startup probe has passed; a container without one has passed at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plimsoll_local.agent.api import Json
from plimsoll_local.agent.node_services import NodeServices
from plimsoll_local.agent.probes import (
    ProbeCount,
    ProbeKind,
    ProbeSchedule,
    try_probe,
)
from plimsoll_local.agent.process import Container


class Prober:
    """Probes ``process`` at ``address`` from its creation until :meth:`close`.

    ``judge(kind, healthy)`` is called once for each change of a verdict: startup passed or failed,
    liveness failed, readiness either way. ``complain(message)`` is called for every failed try.
    """

    def __init__(
        self,
        services: NodeServices,
        container: Json,
        process: Container,
        address: str,
        judge: Callable[[ProbeKind, bool], None],
        complain: Callable[[str], None],
    ) -> None:
        self._services = services
        self._container = container
        self._process = process
        self._address = address
        self._judge = judge
        self._complain = complain
        self._startup_passed = asyncio.Event()
        self._tasks = {
            kind: asyncio.create_task(self._probe(kind))
            for kind in ProbeKind
            if kind.field in container
        }
        if ProbeKind.STARTUP not in self._tasks:
            self._pass_startup()

    def stop_killing(self) -> None:
        """The container is being stopped: only readiness still matters."""
        for kind in (ProbeKind.STARTUP, ProbeKind.LIVENESS):
            if kind in self._tasks:
                self._tasks[kind].cancel()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _pass_startup(self) -> None:
        self._startup_passed.set()
        self._judge(ProbeKind.STARTUP, True)
        if ProbeKind.READINESS not in self._tasks:
            self._judge(ProbeKind.READINESS, True)

    async def _probe(self, kind: ProbeKind) -> None:
        probe = self._container[kind.field]
        schedule = ProbeSchedule.of(probe)
        count = ProbeCount()
        if kind is not ProbeKind.STARTUP:
            await self._startup_passed.wait()
        loop = asyncio.get_running_loop()
        running_for = self._services.clock() - self._process.started_at
        await asyncio.sleep(max(0.0, schedule.initial_delay - running_for))
        while True:
            began = loop.time()
            result = await try_probe(
                probe,
                self._container,
                self._address,
                self._services.http,
                self._process.execute,
            )
            if self._process.exited.done():
                return
            if not result.success:
                self._complain(f"{kind.title} probe failed: {result.message}")
            before, count = count.verdict, count.add(result.success, schedule)
            if kind is ProbeKind.READINESS:
                if count.verdict is not None and count.verdict != before:
                    self._judge(kind, count.verdict)
            elif count.verdict is False:
                self._judge(kind, False)
                return
            elif kind is ProbeKind.STARTUP and count.verdict:
                self._pass_startup()
                return
            await asyncio.sleep(max(0.0, began + schedule.period - loop.time()))
