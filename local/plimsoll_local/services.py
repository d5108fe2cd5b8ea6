"""ClusterIP Services: a TCP proxy in user space on every Service address.

In: Services and EndpointSlices, watched. Out: listeners on each ClusterIP and TCP port that pass
connections, in turn, to the ready endpoints. TCP only; session affinity, NodePort and UDP are not
supported. What should listen where is a pure function (:func:`plan_routes`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll_local.agent.api import Api, Informer
from plimsoll_local.network import add_local_address, remove_local_address
from plimsoll_local.relay import Handler, join, keep_tasks

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

    def __init__(self, api: Api) -> None:
        self._changed = asyncio.Event()
        self._services = Informer(api, "/api/v1/services", self._note_change)
        self._slices = Informer(api, "/apis/discovery.k8s.io/v1/endpointslices", self._note_change)
        self._backends: dict[Frontend, tuple[Backend, ...]] = {}
        self._servers: dict[Frontend, asyncio.Server] = {}
        self._turn = itertools.count()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._services.run())
            tasks.create_task(self._slices.run())
            tasks.create_task(self._apply_changes())

    def _note_change(self, kind: str, changed: Json) -> None:
        self._changed.set()

    async def _apply_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._apply(
                plan_routes(self._services.objects.values(), self._slices.objects.values())
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
                    keep_tasks(self._accept_for(frontend)), frontend.address, frontend.port
                )
            except OSError as error:
                log.warning("cannot listen on %s: %s", frontend, error)
        for address in addresses - {frontend.address for frontend in routes}:
            await asyncio.to_thread(remove_local_address, address)

    def _accept_for(self, frontend: Frontend) -> Handler:
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


async def run(kubeconfig: Path) -> None:
    api = await Api.connect(kubeconfig)
    try:
        await ServiceProxy(api).run()
    finally:
        await api.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="plimsoll_local.services", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(run(parser.parse_args().kubeconfig))


if __name__ == "__main__":
    main()
