"""What the API server has of some kinds, kept by a list and a watch of each.

In: a connection, kinds, namespaces. Out: objects as ``Cluster.get`` and ``Cluster.find`` return them, and a
call for each that changed. What is read here may be behind: by moments while the watch works, by at most
SILENT_SECONDS when its connection has died without a word. So it tells that there is nothing to do; whoever
would write because of it looks in the cluster first (reconcile.py). Of a kind that cannot be listed, for want of
rights say, every read goes to the cluster.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from plimsoll_operator import names
from plimsoll_operator.cluster import ApiError, Cluster
from plimsoll_operator.resources import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    JOB,
    MEMORY_PROFILE,
    NETWORK_POLICY,
    POD,
    SERVICE,
    STATEFUL_SET,
    Resource,
)
from plimsoll_operator.workers import FIRST_PAUSE, LONGEST_PAUSE, Key

logger = logging.getLogger(__name__)

Json = dict[str, Any]

# A bookmark comes every 60 s; the API server remembers what happened for 75 s.
SILENT_SECONDS = 70.0
# Before a watch that has ended is begun anew, lest a server that ends each at once be asked without end.
RECONNECT_SECONDS = 0.1
# Secrets are not among them: the right to list them would be the right to read every one.
CACHED = (
    POD,
    STATEFUL_SET,
    SERVICE,
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    JOB,
    MEMORY_PROFILE,
)


class Reader(Protocol):
    """``Cluster`` is one."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Json | None: ...

    async def find(self, resource: Resource, namespace: str, label_selector: str) -> list[Json]: ...


def count_watches(namespaces: Sequence[str]) -> int:
    """That ``Caches`` of them keep open."""
    return len(CACHED) * max(len(namespaces), 1)


class Caches:
    """``run`` fills them until it is cancelled; ``changed`` gets the deployment of each child that
    changed. No namespaces: all of them."""

    def __init__(
        self, cluster: Cluster, namespaces: Sequence[str], changed: Callable[[Key], None]
    ) -> None:
        self._cluster = cluster
        self._caches = {
            (resource, namespace): WatchCache(cluster, resource, namespace, changed)
            for resource in CACHED
            for namespace in namespaces or (None,)
        }

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for cache in self._caches.values():
                tasks.create_task(cache.run())

    async def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        cache = self._cache(resource, namespace)
        if cache is None:
            return await self._cluster.get(resource, namespace, name)
        return cache.get(namespace, name)

    async def find(self, resource: Resource, namespace: str, label_selector: str) -> list[Json]:
        cache = self._cache(resource, namespace)
        if cache is None:
            return await self._cluster.find(resource, namespace, label_selector)
        return cache.find(namespace, dict(pair.split("=") for pair in label_selector.split(",")))

    def _cache(self, resource: Resource, namespace: str) -> WatchCache | None:
        """None where nothing is known."""
        cache = self._caches.get((resource, None)) or self._caches.get((resource, namespace))
        return cache if cache is not None and cache.listed else None


class WatchCache:
    """One kind, in one namespace or (None) in all. Objects are kept as JSON: that takes a tenth of the
    memory, and each reader gets its own."""

    def __init__(
        self,
        cluster: Cluster,
        resource: Resource,
        namespace: str | None,
        changed: Callable[[Key], None],
    ) -> None:
        self.listed = False
        self._cluster = cluster
        self._resource = resource
        self._namespace = namespace
        # A profile belongs to no deployment.
        self._labels = "" if resource == MEMORY_PROFILE else names.DEPLOYMENT_LABEL
        self._changed = changed
        self._objects: dict[tuple[str, str], bytes] = {}
        self._owned: dict[Key, set[str]] = {}

    def get(self, namespace: str, name: str) -> Json | None:
        found = self._objects.get((namespace, name))
        return None if found is None else self._read(found)

    def find(self, namespace: str, labels: Mapping[str, str]) -> list[Json]:
        """Of one deployment: by its instance label, which every child has."""
        owned = self._owned.get(Key(namespace, labels["app.kubernetes.io/instance"]), set())
        read = (self._read(self._objects[namespace, name]) for name in sorted(owned))
        return [each for each in read if labels.items() <= each["metadata"]["labels"].items()]

    async def run(self) -> None:
        """Never returns by itself."""
        pause = FIRST_PAUSE
        while True:
            try:
                version = await self._list()
                pause = FIRST_PAUSE
                await self._watch(version)
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                if not self.listed:
                    logger.warning(
                        "%s are read one by one: %s; again in %g s",
                        self._resource.plural,
                        error,
                        pause,
                    )
            # What is not watched is not known.
            self.listed = False
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _list(self) -> str:
        listing = await self._cluster.list_all(self._resource, self._namespace, self._labels)
        before = self._objects
        self._objects, self._owned = {}, {}
        kind = {"apiVersion": self._resource.api_version, "kind": self._resource.kind}
        for body in listing["items"]:
            self._keep({**kind, **body})
        self.listed = True
        for key in before.keys() | self._objects.keys():
            if before.get(key) != self._objects.get(key):
                self._tell(before.get(key) or self._objects[key])
        return str(listing["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> None:
        """Until the version to go on from has expired."""
        while True:
            try:
                async for event in self._cluster.watch(
                    self._resource, self._namespace, self._labels, version, SILENT_SECONDS
                ):
                    body = event["object"]
                    if event["type"] == "ERROR":
                        raise ApiError(body.get("code", 0), body.get("message", "no message"))
                    version = body["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._note(event["type"], body)
            except TimeoutError:
                # Dead perhaps, or quiet: another connection tells, from the same version on.
                logger.debug("the watch of %s was silent", self._resource.plural)
            await asyncio.sleep(RECONNECT_SECONDS)

    def _note(self, kind: str, body: Json) -> None:
        if kind == "DELETED":
            self._drop(body)
        else:
            self._keep(body)
        self._changed_of(body)

    def _keep(self, body: Json) -> None:
        metadata = body["metadata"]
        self._objects[metadata["namespace"], metadata["name"]] = json.dumps(body).encode()
        self._owned.setdefault(_owner(body), set()).add(metadata["name"])

    def _drop(self, body: Json) -> None:
        metadata, owner = body["metadata"], _owner(body)
        self._objects.pop((metadata["namespace"], metadata["name"]), None)
        owned = self._owned.get(owner, set())
        owned.discard(metadata["name"])
        if not owned:
            self._owned.pop(owner, None)

    def _tell(self, kept: bytes) -> None:
        self._changed_of(self._read(kept))

    def _changed_of(self, body: Json) -> None:
        owner = _owner(body)
        if owner.name:
            self._changed(owner)

    @staticmethod
    def _read(kept: bytes) -> Json:
        body: Json = json.loads(kept)
        return body


def _owner(body: Json) -> Key:
    metadata = body["metadata"]
    return Key(metadata["namespace"], metadata.get("labels", {}).get(names.DEPLOYMENT_LABEL, ""))
