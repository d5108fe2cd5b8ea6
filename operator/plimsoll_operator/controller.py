"""The running controller: its connections, its options and what it carries from pass to pass.

In: triggers. Out: passes (reconcile.py), one worker per LLMDeployment. What is carried here may be
lost at any moment: everything that matters is in the cluster.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from plimsoll_operator import __version__
from plimsoll_operator.cluster import Cluster
from plimsoll_operator.engines import Engines, RemoteEngines
from plimsoll_operator.reconcile import Carried, reconcile
from plimsoll_operator.report import report_failure
from plimsoll_operator.telemetry import Telemetry
from plimsoll_operator.workers import Key, Workers

logger = logging.getLogger(__name__)

DEFAULT_ENGINE_IMAGE = f"plimsoll/engine:{__version__}"


@dataclass(frozen=True)
class Options:
    """``engine_image`` serves deployments that name none. ``clusterwide`` False: what lies outside
    of the watched namespaces is not even asked for, since it needs rights of the whole cluster.
    ``operator_namespace``: the control channel is open to the operator's pods there alone."""

    engine_image: str = DEFAULT_ENGINE_IMAGE
    clusterwide: bool = True
    operator_namespace: str | None = None


class Controller:
    """``engines`` None: those in the cluster's pods."""

    def __init__(
        self,
        options: Options,
        engines: Engines | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._options = options
        self._telemetry = telemetry or Telemetry()
        self._workers = Workers(self._pass)
        self._carried: dict[Key, Carried] = {}
        self._failing: set[Key] = set()
        self._cluster: Cluster | None = None
        self._engines = engines
        self._remote: RemoteEngines | None = None

    @property
    def options(self) -> Options:
        return self._options

    async def start(self) -> None:
        self._cluster = await Cluster.connect(self._telemetry)
        if self._engines is None:
            self._engines = self._remote = RemoteEngines()

    async def stop(self) -> None:
        await self._workers.stop()
        if self._remote is not None:
            await self._remote.close()
        if self._cluster is not None:
            await self._cluster.close()

    def trigger(self, key: Key) -> None:
        self._workers.trigger(key)

    def nudge(self, key: Key) -> None:
        self._workers.nudge(key)

    async def _pass(self, key: Key) -> float | None:
        assert self._cluster is not None
        try:
            with self._telemetry.measure_pass():
                due = await self._reconcile(self._cluster, key)
        except Exception as error:
            # One lost request is no news; what fails twice in a row is.
            if key in self._failing:
                await self._show(self._cluster, key, error)
            self._failing.add(key)
            raise
        self._failing.discard(key)
        return due

    async def _show(self, cluster: Cluster, key: Key, error: Exception) -> None:
        try:
            await report_failure(cluster, key, error, time.time())
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
            carried=self._carried.get(key),
            now=now,
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
