"""A cluster of one LLMDeployment in memory, enough for whole passes of the operator."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from plimsoll_operator.cluster import Cluster, Resource
from plimsoll_operator.observed import Credentials, Pod
from plimsoll_operator.plan.canary import Probe
from plimsoll_operator.spec import Deployment
from plimsoll_operator.tuning.values import EngineReading, Limits, LimitsOutcome, Unknown
from support.resources import pod_body

Json = dict[str, Any]


class MemoryCluster(Cluster):
    """``foreign`` is the part of the status that belongs to another field manager: it stays, until
    an apply has the same field."""

    def __init__(self, resource: Json, *, profile: Json | None = None, **pod: Any) -> None:
        self.resource = resource
        self.events: list[Json] = []
        self.status_writes = 0
        self.foreign: Json = {}
        self._profile = profile
        self._pod = pod
        self._children: dict[tuple[str, str], Json] = {}

    async def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        if resource.kind == "LLMDeployment":
            return copy.deepcopy(self.resource)
        if resource.kind == "MemoryProfile":
            return copy.deepcopy(self._profile)
        return copy.deepcopy(self._children.get((resource.kind, name)))

    async def find(self, resource: Resource, namespace: str, label_selector: str) -> list[Json]:
        body = pod_body(**self._pod)
        body["metadata"]["ownerReferences"] = [{"uid": "uid-StatefulSet", "controller": True}]
        return [body]

    async def apply(self, body: Json) -> Json:
        kind = body["kind"]
        live = copy.deepcopy(body)
        live["metadata"] |= {"uid": f"uid-{kind}", "generation": 1, "resourceVersion": "1"}
        if kind == "StatefulSet":
            live["status"] = {"observedGeneration": 1, "updateRevision": "new"}
        self._children[kind, body["metadata"]["name"]] = live
        return live

    async def patch_child(self, live: Json, patch: Json) -> Json:
        return live

    async def apply_status(self, resource: Resource, body: Json) -> Json:
        if resource.kind == "LLMDeployment":
            self.status_writes += 1
            self.foreign = kept(self.foreign, body["status"])
            self.resource["status"] = merged(self.foreign, copy.deepcopy(body["status"]))
        return copy.deepcopy(self.resource)

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        self.events.append(body)
        return body

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        pass

    def condition(self, kind: str) -> Json:
        found: Json = next(
            each for each in self.resource["status"]["conditions"] if each["type"] == kind
        )
        return found


def kept(foreign: Json, applied: Json) -> Json:
    """What another owner still has after a server-side apply by force."""
    return {
        key: kept(part, applied[key]) if isinstance(part, dict) and key in applied else part
        for key, part in foreign.items()
        if key not in applied or isinstance(part, dict)
    }


def merged(foreign: Json, applied: Json) -> Json:
    result = {**foreign, **applied}
    for key, part in foreign.items():
        if isinstance(part, dict) and isinstance(applied.get(key), dict):
            result[key] = merged(part, applied[key])
    return result


class SilentEngines:
    """Engines that can be read, or not, and take every limit."""

    def __init__(self, *readings: EngineReading | Unknown) -> None:
        self._readings = readings

    async def read(
        self, deployment: Deployment, pods: Iterable[Pod]
    ) -> dict[str, EngineReading | Unknown]:
        names = {pod.name for pod in pods}
        return {reading.pod: reading for reading in self._readings if reading.pod in names}

    async def set_limits(
        self, pods: Iterable[Pod], credentials: Credentials, revision: int, limits: Limits
    ) -> dict[str, LimitsOutcome]:
        return {}

    def probe(
        self, deployment: Deployment, pod: Pod, *, tokens: int, api_key: str | None
    ) -> Probe | None:
        return None
