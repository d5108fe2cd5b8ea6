"""The running controller: its connections, its options and what it carries from pass to pass.

In: triggers. Out: passes (reconcile.py, advisor/passes.py), one worker per LLMDeployment and one per
MemoryAdvisor. What is carried here may be lost at any moment: everything that matters is in the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from plimsoll_operator import __version__
from plimsoll_operator import cluster as api
from plimsoll_operator.advisor import passes as advising
from plimsoll_operator.advisor.pages import Pages, RemotePages
from plimsoll_operator.cluster import Cluster, Resource
from plimsoll_operator.engines import Engines, RemoteEngines
from plimsoll_operator.reconcile import Carried, reconcile
from plimsoll_operator.report import report_failure
from plimsoll_operator.telemetry import Telemetry
from plimsoll_operator.watch_cache import Caches, count_watches
from plimsoll_operator.workers import Key, Workers

logger = logging.getLogger(__name__)

DEFAULT_ENGINE_IMAGE = f"plimsoll/engine:{__version__}"


@dataclass(frozen=True)
class Options:
    """``engine_image`` serves deployments that name none. ``namespaces`` are watched, none named: all; what lies
    outside is not even asked for, since it needs rights of the whole cluster.
    ``operator_namespace``: the control channel is open to the operator's pods there alone.
    ``rotate_after``: seconds that its credentials are used for, None: for ever."""

    engine_image: str = DEFAULT_ENGINE_IMAGE
    namespaces: tuple[str, ...] = ()
    operator_namespace: str | None = None
    rotate_after: float | None = None

    @property
    def clusterwide(self) -> bool:
        return not self.namespaces


class Controller:
    """``engines`` and ``pages`` None: those in the cluster's pods."""

    def __init__(
        self,
        options: Options,
        engines: Engines | None = None,
        telemetry: Telemetry | None = None,
        pages: Pages | None = None,
    ) -> None:
        self._options = options
        self._telemetry = telemetry or Telemetry()
        self._workers = Workers(self._pass)
        self._advisors = Workers(self._advisor_pass)
        self._carried: dict[Key, Carried] = {}
        self._advised: dict[Key, advising.Carried] = {}
        self._failing: set[tuple[Resource, Key]] = set()
        self._cluster: Cluster | None = None
        self._caches: Caches | None = None
        self._filling: asyncio.Task[None] | None = None
        self._engines = engines
        self._pages = pages
        self._connections: list[RemoteEngines | RemotePages] = []

    @property
    def options(self) -> Options:
        return self._options

    async def start(self) -> None:
        namespaces = self._options.namespaces
        watches = count_watches(namespaces)
        self._cluster = await Cluster.connect(self._telemetry, watches=watches)
        self._caches = Caches(self._cluster, namespaces, self.nudge)
        self._filling = asyncio.create_task(self._caches.run(), name="watch caches")
        if self._engines is None:
            self._engines = engines = RemoteEngines()
            self._connections.append(engines)
        if self._pages is None:
            self._pages = pages = RemotePages()
            self._connections.append(pages)

    async def stop(self) -> None:
        await self._workers.stop()
        await self._advisors.stop()
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        for connection in self._connections:
            await connection.close()
        if self._cluster is not None:
            await self._cluster.close()

    def trigger(self, key: Key) -> None:
        self._workers.trigger(key)

    def nudge(self, key: Key) -> None:
        self._workers.nudge(key)

    def trigger_advisor(self, key: Key) -> None:
        self._advisors.trigger(key)

    async def _pass(self, key: Key) -> float | None:
        return await self._measured(api.LLM_DEPLOYMENT, key, self._reconcile)

    async def _advisor_pass(self, key: Key) -> float | None:
        return await self._measured(api.MEMORY_ADVISOR, key, self._advise)

    async def _measured(
        self,
        kind: Resource,
        key: Key,
        run: Callable[[Cluster, Key], Awaitable[float | None]],
    ) -> float | None:
        assert self._cluster is not None
        try:
            with self._telemetry.measure_pass():
                due = await run(self._cluster, key)
        except Exception as error:
            # One lost request is no news; what fails twice in a row is.
            if (kind, key) in self._failing:
                await self._show(self._cluster, kind, key, error)
            self._failing.add((kind, key))
            raise
        self._failing.discard((kind, key))
        return due

    async def _show(self, cluster: Cluster, kind: Resource, key: Key, error: Exception) -> None:
        try:
            await report_failure(cluster, key, error, time.time(), kind)
        except Exception:
            # Most likely the same trouble; the worker logs the error itself.
            logger.warning("%s/%s: the failure cannot be shown", *key, exc_info=True)

    async def _reconcile(self, cluster: Cluster, key: Key) -> float | None:
        assert self._engines is not None
        now = time.time()
        outcome = await reconcile(
            cluster,
            self._engines,
            key,
            engine_image=self._options.engine_image,
            operator_namespace=self._options.operator_namespace,
            rotate_after=self._options.rotate_after,
            carried=self._carried.get(key),
            now=now,
            remembered=self._caches,
        )
        if outcome is None:
            self._carried.pop(key, None)
            self._telemetry.forget(*key)
            return None
        for change in outcome.changes:
            self._telemetry.count_decision(change.rule.value, change.parameter.value)
        self._telemetry.note_standing(*key, outcome.standing)
        if outcome.read_all:
            self._telemetry.note_scrape(*key, now)
        if outcome.carried is not None:
            self._carried[key] = outcome.carried
        return outcome.due_in

    async def _advise(self, cluster: Cluster, key: Key) -> float | None:
        assert self._pages is not None
        carried = self._advised.get(key)
        outcome = await advising.run_pass(
            cluster, self._pages, key, carried=carried, now=time.time()
        )
        if outcome is None:
            self._advised.pop(key, None)
            return None
        if outcome.carried is not None:
            self._advised[key] = outcome.carried
        return outcome.due_in
