"""The node agent: keeps the Node, and one worker for each pod bound to it.

In: an API connection and settings. Out: pods that run. Start-up cleans what an earlier agent left:
its processes ended with it, its mounts and directories may not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web
from kubernetes.aio.client.exceptions import ApiException

from plimsoll_local.agent.api import CONNECTION_ERRORS, Api, Informer, Json
from plimsoll_local.agent.back_off import BackOffPolicy
from plimsoll_local.agent.cluster_objects import ClusterObjects
from plimsoll_local.agent.content import referenced_objects
from plimsoll_local.agent.events import EventRecorder
from plimsoll_local.agent.images import ImageTable
from plimsoll_local.agent.linux import unmount
from plimsoll_local.agent.node import NodeIdentity, NodeRegistration, measure_capacity
from plimsoll_local.agent.node_services import NodeServices, PodNetwork
from plimsoll_local.agent.pod_worker import PodWorker
from plimsoll_local.agent.quantities import parse_quantity
from plimsoll_local.agent.server import (
    LogLookup,
    LogNotFoundError,
    build_application,
    make_certificate,
)
from plimsoll_local.agent.state import ContainerState, Waiting

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class AgentConfig:
    """``capacity`` adds to or replaces what the machine has, as quantities by resource name."""

    kubeconfig: Path
    directory: Path
    images: Path
    identity: NodeIdentity
    capacity: Mapping[str, str]
    back_off: BackOffPolicy


class NodeAgent:
    """Runs until cancelled."""

    def __init__(self, config: AgentConfig, api: Api, network: PodNetwork) -> None:
        self._config = config
        self._api = api
        self._network = network
        self._workers: dict[str, tuple[PodWorker, asyncio.Task[None]]] = {}
        self._pods = Informer(
            api,
            "/api/v1/pods",
            self._on_pod,
            {"fieldSelector": f"spec.nodeName={config.identity.name}"},
        )
        self._objects = ClusterObjects(api, self._on_content, self._write_hosts)
        self._services: NodeServices | None = None

    async def run(self) -> None:
        config = self._config
        config.directory.mkdir(parents=True, exist_ok=True)
        unmount_all_below(config.directory)
        capacity = measure_capacity(config.directory, config.capacity)
        images = ImageTable(config.images)
        node = NodeRegistration(self._api, config.identity, capacity, images.names, time.time)
        events = EventRecorder(self._api, config.identity.name, time.time)
        # A probe must show what a new client would see, so no connection is kept.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            self._services = NodeServices(
                api=self._api,
                objects=self._objects,
                events=events,
                images=images,
                network=self._network,
                http=http,
                directory=config.directory,
                node_name=config.identity.name,
                host_ip=config.identity.address,
                allocatable={name: parse_quantity(text) for name, text in capacity.items()},
                back_off=config.back_off,
                clock=time.time,
            )
            runner = await self._serve_logs()
            try:
                await self._register(node)
                await self._watch(node, events)
            finally:
                for _, task in self._workers.values():
                    task.cancel()
                tasks = [task for _, task in self._workers.values()]
                await asyncio.gather(*tasks, return_exceptions=True)
                await runner.cleanup()

    async def _register(self, node: NodeRegistration) -> None:
        while True:
            try:
                await node.register()
                return
            except ApiException as error:
                log.warning("registering: %s %s", error.status, error.reason)
            except CONNECTION_ERRORS as error:
                log.warning("registering: %s", error or type(error).__name__)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _watch(self, node: NodeRegistration, events: EventRecorder) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(node.run())
            group.create_task(events.run())
            for informer in self._objects.informers:
                group.create_task(informer.run())
            # A pod that starts must find what it mounts.
            for informer in self._objects.informers:
                await informer.synced.wait()
            group.create_task(self._pods.run())
            await self._pods.synced.wait()
            self._remove_orphans()
            log.info("node %s is ready", self._config.identity.name)

    def _remove_orphans(self) -> None:
        """Directories of pods that were deleted while no agent ran."""
        for parent in ("pods", "logs"):
            directory = self._config.directory / parent
            for path in directory.iterdir() if directory.exists() else ():
                if path.name.rpartition("_")[2] not in self._workers:
                    shutil.rmtree(path, ignore_errors=True)

    # Watches ---------------------------------------------------------------------------------

    def _on_pod(self, kind: str, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        known = self._workers.get(uid)
        if kind == "DELETED":
            if known is not None:
                known[0].vanish()
        elif known is not None:
            known[0].see(pod)
        elif self._services is not None:
            worker = PodWorker(self._services, pod, lambda: self._pods.objects.values())
            task = asyncio.create_task(worker.run())
            self._workers[uid] = (worker, task)
            task.add_done_callback(lambda done: self._on_worker_end(uid, done))
        self._write_hosts()

    def _on_worker_end(self, uid: str, task: asyncio.Task[None]) -> None:
        del self._workers[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            # A defect, and this pod's end: the others go on.
            log.error("worker of pod %s failed", uid, exc_info=error)

    def _on_content(self, kind: str, obj: Json) -> None:
        meta = obj["metadata"]
        for worker, _ in self._workers.values():
            same = worker.pod["metadata"]["namespace"] == meta.get("namespace")
            if same and (kind, meta["name"]) in referenced_objects(worker.pod):
                worker.content_changed()

    def _write_hosts(self) -> None:
        for worker, _ in self._workers.values():
            worker.write_hosts()

    # Logs ------------------------------------------------------------------------------------

    async def _serve_logs(self) -> web.AppRunner:
        identity = self._config.identity
        lookup = LogLookup(self.find_log, self.is_running)
        runner = web.AppRunner(build_application(lookup), access_log=None)
        await runner.setup()
        context = make_certificate(self._config.directory, identity.address)
        await web.TCPSite(runner, identity.address, identity.port, ssl_context=context).start()
        return runner

    def _find_worker(self, namespace: str, name: str) -> PodWorker:
        pod = self._pods.get(namespace, name)
        known = None if pod is None else self._workers.get(pod["metadata"]["uid"])
        if known is None:
            raise LogNotFoundError(f'pod "{name}" not found on this node')
        return known[0]

    def find_log(self, namespace: str, name: str, container: str, previous: bool) -> Path:
        """The log file of a container's current or previous attempt."""
        worker = self._find_worker(namespace, name)
        state = worker.observed.containers.get(container)
        if state is None:
            raise LogNotFoundError(f'container "{container}" not found in pod "{name}"')
        if not state.attempted:
            raise LogNotFoundError(f'container "{container}" in pod "{name}" is waiting to start')
        attempt = attempt_to_show(state, previous)
        path = None
        if attempt is not None and self._services is not None:
            path = self._services.log_file(worker.pod, container, attempt)
        if path is None or not path.exists():
            which = "previous terminated container" if previous else "log of container"
            raise LogNotFoundError(f'{which} "{container}" in pod "{name}" not found')
        return path

    def is_running(self, namespace: str, name: str, container: str) -> bool:
        with contextlib.suppress(LogNotFoundError):
            worker = self._find_worker(namespace, name)
            return worker.observed.containers[container].alive
        return False


def attempt_to_show(state: ContainerState, previous: bool) -> int | None:
    """Which start of a container ``kubectl logs`` means; None when there is none.

    A container that waits for its next start has its last one as current and as previous alike."""
    if not previous:
        return state.restart_count
    if state.last is None:
        return None
    return state.restart_count - (0 if isinstance(state.state, Waiting) else 1)


def unmount_all_below(directory: Path) -> None:
    """Takes away what an earlier agent in this mount namespace left mounted, deepest first."""
    places = [
        line.split()[4].encode().decode("unicode_escape")
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
    ]
    root = f"{directory.resolve()}/"
    for place in sorted((p for p in places if p.startswith(root)), key=len, reverse=True):
        unmount(place)
