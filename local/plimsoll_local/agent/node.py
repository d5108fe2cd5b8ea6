"""This machine as a Node object: what it offers, and the sign that it is alive.

In: a name, addresses and extra capacity. Out: a registered Node, its status and a Lease renewed every
few seconds. The pure builders give the documents; :class:`NodeRegistration` writes them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kubernetes.aio.client.exceptions import ApiException

from plimsoll_local.agent.api import CONNECTION_ERRORS, MERGE, STRATEGIC_MERGE, Api, Json
from plimsoll_local.agent.status import api_time

log = logging.getLogger(__name__)

LEASE_NAMESPACE = "kube-node-lease"
LEASE_SECONDS = 40
LEASE_PERIOD = 10.0
# A node's status is written this often when nothing changes, as by a kubelet.
STATUS_PERIOD = 300.0
MAX_PODS = 110
KUBELET_VERSION = "v1.36.3"


@dataclass(frozen=True)
class NodeIdentity:
    """``port`` is where the log server listens on ``address``."""

    name: str
    address: str
    port: int


def measure_capacity(directory: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """What this machine has, as quantities; ``extra`` adds to it or replaces it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory // 1024}Ki",
        "ephemeral-storage": f"{shutil.disk_usage(directory).total // 1024}Ki",
        "pods": str(MAX_PODS),
        **extra,
    }


def build_node(identity: NodeIdentity) -> Json:
    labels = {
        "kubernetes.io/hostname": identity.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": _architecture(),
        "plimsoll.dev/node-agent": "true",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": identity.name, "labels": labels},
    }


def build_node_status(
    identity: NodeIdentity,
    capacity: Mapping[str, str],
    images: tuple[str, ...],
    since: float,
    now: float,
) -> Json:
    """All of a machine's capacity is allocatable: nothing is set aside for the system. The node
    has been ready ``since`` then (Unix seconds)."""
    healthy = {
        "MemoryPressure": ("False", "KubeletHasSufficientMemory"),
        "DiskPressure": ("False", "KubeletHasNoDiskPressure"),
        "PIDPressure": ("False", "KubeletHasSufficientPID"),
        "Ready": ("True", "KubeletReady"),
    }
    uname = os.uname()
    return {
        "capacity": dict(capacity),
        "allocatable": dict(capacity),
        "addresses": [
            {"type": "InternalIP", "address": identity.address},
            {"type": "Hostname", "address": identity.name},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": identity.port}},
        "conditions": [
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": "the node agent runs pods as local processes",
                "lastHeartbeatTime": api_time(now),
                "lastTransitionTime": api_time(since),
            }
            for kind, (status, reason) in healthy.items()
        ],
        "nodeInfo": {
            "architecture": _architecture(),
            "operatingSystem": "linux",
            "osImage": platform.platform(),
            "kernelVersion": uname.release,
            "kubeletVersion": KUBELET_VERSION,
            "kubeProxyVersion": "",
            "containerRuntimeVersion": "plimsoll://0.1.0",
            "machineID": "",
            "systemUUID": "",
            "bootID": "",
        },
        "images": [{"names": [name], "sizeBytes": 0} for name in images],
    }


def _architecture() -> str:
    machine = os.uname().machine
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


class NodeRegistration:
    """Keeps the Node and its Lease."""

    def __init__(
        self,
        api: Api,
        identity: NodeIdentity,
        capacity: Mapping[str, str],
        images: Callable[[], tuple[str, ...]],
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._identity = identity
        self._capacity = capacity
        self._images = images
        self._clock = clock
        self._since = clock()

    async def register(self) -> None:
        """Creates the Node if there is none and writes its whole status."""
        try:
            await self._api.request("POST", "/api/v1/nodes", build_node(self._identity))
        except ApiException as error:
            if error.status != 409:
                raise
        await self._write_status()
        await self._renew_lease()

    async def run(self) -> None:
        """Heartbeats until cancelled; the API server may be away for a while."""
        written_at = self._clock()
        while True:
            await asyncio.sleep(LEASE_PERIOD)
            try:
                await self._renew_lease()
                if self._clock() - written_at >= STATUS_PERIOD:
                    written_at = self._clock()
                    await self._write_status()
            except ApiException as error:
                log.warning("heartbeat: %s %s", error.status, error.reason)
            except CONNECTION_ERRORS as error:
                log.warning("heartbeat: %s", error or type(error).__name__)

    async def _write_status(self) -> None:
        now = self._clock()
        status = build_node_status(self._identity, self._capacity, self._images(), self._since, now)
        path = f"/api/v1/nodes/{self._identity.name}/status"
        await self._api.request("PATCH", path, {"status": status}, content_type=STRATEGIC_MERGE)

    async def _renew_lease(self) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{LEASE_NAMESPACE}/leases"
        renewed = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": self._identity.name,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": renewed,
        }
        name = self._identity.name
        try:
            await self._api.request("PATCH", f"{path}/{name}", {"spec": spec}, content_type=MERGE)
        except ApiException as error:
            if error.status != 404:
                raise
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name, "namespace": LEASE_NAMESPACE},
                "spec": spec,
            }
            await self._api.request("POST", path, lease)
