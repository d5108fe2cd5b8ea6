"""What every pod worker needs of its node: one frozen bundle of collaborators and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Protocol

import aiohttp

from plimsoll_local.agent.api import Api, Json
from plimsoll_local.agent.back_off import BackOffPolicy
from plimsoll_local.agent.cluster_objects import ClusterObjects
from plimsoll_local.agent.environment import Facts
from plimsoll_local.agent.events import EventRecorder
from plimsoll_local.agent.images import ImageTable


@dataclass(frozen=True)
class PodAddress:
    """A pod's network: the path of its network namespace (None: the node's own) and its address."""

    namespace: str | None
    ip: str


class NetworkNamespace(Protocol):
    """A network namespace by the file that names it, and the pod's address in it."""

    @property
    def path(self) -> Path: ...

    @property
    def ip(self) -> str: ...


class PodNetwork(Protocol):
    """Gives each pod a network namespace; plimsoll_local.network does. Both calls block for
    milliseconds and may come from any thread."""

    def create(self, pod_uid: str) -> NetworkNamespace: ...

    def delete(self, pod_uid: str) -> None: ...


@dataclass(frozen=True)
class NodeServices:
    """``directory`` holds what the agent keeps on disk; ``clock`` is Unix seconds."""

    api: Api
    objects: ClusterObjects
    events: EventRecorder
    images: ImageTable
    network: PodNetwork
    http: aiohttp.ClientSession
    directory: Path
    node_name: str
    host_ip: str
    allocatable: Mapping[str, Decimal]
    back_off: BackOffPolicy
    clock: Callable[[], float]

    def facts(self, pod_ip: str) -> Facts:
        return Facts(self.host_ip, pod_ip, self.node_name, self.allocatable)

    def pod_directory(self, pod: Json) -> Path:
        return self.directory / "pods" / str(pod["metadata"]["uid"])

    def log_directory(self, pod: Json) -> Path:
        meta = pod["metadata"]
        return self.directory / "logs" / f"{meta['namespace']}_{meta['name']}_{meta['uid']}"

    def log_file(self, pod: Json, container: str, attempt: int) -> Path:
        return self.log_directory(pod) / container / f"{attempt}.log"
