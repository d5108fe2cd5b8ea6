"""Events about pods, as ``kubectl describe`` shows them.

In: pod, type, reason, message. Out: Event objects; a repetition raises the count of the first one.
Recording never fails and never waits: an Event that cannot be written is dropped with a log line.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from kubernetes.aio.client.exceptions import ApiException

from plimsoll_local.agent.api import CONNECTION_ERRORS, MERGE, Api, Json
from plimsoll_local.agent.status import api_time

log = logging.getLogger(__name__)

NORMAL = "Normal"
WARNING = "Warning"
# A probe that fails every second must not become a write every second.
_MIN_SECONDS_BETWEEN_UPDATES = 5.0


@dataclass
class _Series:
    name: str
    count: int
    written_at: float


class EventRecorder:
    """Writes Events in the order they are recorded."""

    def __init__(self, api: Api, node_name: str, clock: Callable[[], float]) -> None:
        self._api = api
        self._node_name = node_name
        self._clock = clock
        self._series: dict[tuple[str, ...], _Series] = {}
        self._queue: asyncio.Queue[tuple[str, str, Json]] = asyncio.Queue()

    def record(
        self, pod: Json, kind: str, reason: str, message: str, container: Json | None = None
    ) -> None:
        meta = pod["metadata"]
        part = "initContainers" if container in pod["spec"].get("initContainers", ()) else None
        field = "" if container is None else f"spec.{part or 'containers'}{{{container['name']}}}"
        key = (meta["uid"], field, kind, reason, message)
        now = self._clock()
        path = f"/api/v1/namespaces/{meta['namespace']}/events"
        series = self._series.get(key)
        if series is not None:
            series.count += 1
            if now - series.written_at >= _MIN_SECONDS_BETWEEN_UPDATES:
                series.written_at = now
                body = {"count": series.count, "lastTimestamp": api_time(now)}
                self._queue.put_nowait(("PATCH", f"{path}/{series.name}", body))
            return
        series = _Series(f"{meta['name']}.{uuid.uuid4().hex[:16]}", 1, now)
        self._series[key] = series
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": series.name, "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
                "fieldPath": field or None,
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "count": 1,
            "firstTimestamp": api_time(now),
            "lastTimestamp": api_time(now),
            "source": {"component": "kubelet", "host": self._node_name},
            "reportingComponent": "kubelet",
            "reportingInstance": self._node_name,
        }
        self._queue.put_nowait(("POST", path, event))

    def forget(self, pod: Json) -> None:
        """Nothing more is to be said of this pod."""
        uid = pod["metadata"]["uid"]
        self._series = {key: value for key, value in self._series.items() if key[0] != uid}

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            method, path, body = await self._queue.get()
            content_type = MERGE if method == "PATCH" else "application/json"
            try:
                await self._api.request(method, path, body, content_type=content_type)
            except ApiException as error:
                # The namespace, or the first Event of a series, may be gone.
                log.debug("event dropped: %s %s", error.status, error.reason)
            except CONNECTION_ERRORS as error:
                log.warning("event dropped: %s", error or type(error).__name__)
