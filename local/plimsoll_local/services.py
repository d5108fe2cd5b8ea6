"""ClusterIP Services: a TCP proxy in user space on every Service address.

In: Services and EndpointSlices, watched. Out: listeners on each ClusterIP and TCP port that pass
connections, in turn, to the ready endpoints. TCP only; session affinity, NodePort and UDP are not
supported. What should listen where is a pure function (:func:`plan_routes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio import client, watch

from plimsoll_local.network import add_local_address, remove_local_address
from plimsoll_local.relay import join

log = logging.getLogger(__name__)

Json = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Frontend:
    address: str
    port: int


@dataclass(frozen=True, order=True)
class Backend:
    address: str
    port: int


def plan_routes(
    services: Iterable[Json], slices: Iterable[Json]
) -> dict[Frontend, tuple[Backend, ...]]:
    """Every Service port with a ClusterIP, and its ready endpoints in a stable order.

    An endpoint whose ``ready`` condition is absent counts as ready, as the API says.
    """
    by_service: dict[tuple[str, str], list[Json]] = {}
    for piece in slices:
        owner = piece["metadata"].get("labels", {}).get("kubernetes.io/service-name")
        if owner:
            by_service.setdefault((piece["metadata"]["namespace"], owner), []).append(piece)
    routes: dict[Frontend, tuple[Backend, ...]] = {}
    for service in services:
        spec, metadata = service["spec"], service["metadata"]
        address = spec.get("clusterIP")
        if not address or address == "None":
            continue
        owned = by_service.get((metadata["namespace"], metadata["name"]), [])
        for port in spec.get("ports", []):
            if port.get("protocol", "TCP") == "TCP":
                routes[Frontend(address, port["port"])] = _find_backends(
                    port.get("name") or "", owned
                )
    return routes


def _find_backends(port_name: str, slices: Iterable[Json]) -> tuple[Backend, ...]:
    found: set[Backend] = set()
    for piece in slices:
        numbers = [
            port["port"]
            for port in piece.get("ports") or []
            if (port.get("name") or "") == port_name and port.get("port")
        ]
        for endpoint in piece.get("endpoints") or []:
            if (endpoint.get("conditions") or {}).get("ready") is False:
                continue
            found.update(
                Backend(address, number)
                for number in numbers
                for address in endpoint.get("addresses", [])
            )
    return tuple(sorted(found))


class ServiceProxy:
    """Keeps the listeners as the plan says. ``run`` never returns by itself."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self._objects: dict[str, dict[str, Json]] = {"services": {}, "slices": {}}
        self._backends: dict[Frontend, tuple[Backend, ...]] = {}
        self._servers: dict[Frontend, asyncio.Server] = {}
        self._turn = itertools.count()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        core, discovery = client.CoreV1Api(self._api), client.DiscoveryV1Api(self._api)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch("services", core.list_service_for_all_namespaces))
            tasks.create_task(
                self._watch("slices", discovery.list_endpoint_slice_for_all_namespaces)
            )
            tasks.create_task(self._apply_changes())

    async def _watch(self, kind: str, list_all: Any) -> None:
        """Lists and watches for ever; a broken or outdated watch starts again from a list."""
        known = self._objects[kind]
        while True:
            try:
                listed = await list_all()
                known.clear()
                for item in listed.items:
                    document = self._api.sanitize_for_serialization(item)
                    known[_key(document)] = document
                self._changed.set()
                async with watch.Watch() as stream:
                    async for event in stream.stream(
                        list_all,
                        resource_version=listed.metadata.resource_version,
                        timeout_seconds=600,
                    ):
                        document = event["raw_object"]
                        if event["type"] == "DELETED":
                            known.pop(_key(document), None)
                        else:
                            known[_key(document)] = document
                        self._changed.set()
            except (client.ApiException, aiohttp.ClientError, OSError, TimeoutError) as error:
                log.warning("watching %s again: %s", kind, error)
                await asyncio.sleep(1)

    async def _apply_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._apply(
                plan_routes(self._objects["services"].values(), self._objects["slices"].values())
            )

    async def _apply(self, routes: dict[Frontend, tuple[Backend, ...]]) -> None:
        addresses = {frontend.address for frontend in self._servers}
        for frontend in [known for known in self._servers if known not in routes]:
            self._servers.pop(frontend).close()
        self._backends = routes
        for frontend in routes:
            if frontend in self._servers:
                continue
            try:
                if frontend.address not in addresses:
                    await asyncio.to_thread(add_local_address, frontend.address)
                    addresses.add(frontend.address)
                self._servers[frontend] = await asyncio.start_server(
                    self._accept_for(frontend), frontend.address, frontend.port
                )
            except OSError as error:
                log.warning("cannot listen on %s: %s", frontend, error)
        for address in addresses - {frontend.address for frontend in routes}:
            await asyncio.to_thread(remove_local_address, address)

    def _accept_for(self, frontend: Frontend) -> Any:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                far = await self._connect(frontend)
                if far is not None:
                    await join(reader, writer, *far)
            finally:
                with contextlib.suppress(OSError):
                    writer.close()

        return accept

    async def _connect(
        self, frontend: Frontend
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The next endpoint in turn that takes the connection; None when there is none."""
        backends = self._backends.get(frontend, ())
        first = next(self._turn)
        for step in range(len(backends)):
            backend = backends[(first + step) % len(backends)]
            with contextlib.suppress(OSError, TimeoutError):
                return await asyncio.wait_for(
                    asyncio.open_connection(backend.address, backend.port), 5
                )
        return None


def _key(document: Json) -> str:
    return f"{document['metadata'].get('namespace', '')}/{document['metadata']['name']}"
