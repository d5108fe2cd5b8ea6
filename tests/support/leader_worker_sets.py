"""A stand-in for the LeaderWorkerSet controller: enough of it for groups that start, roll and restart.

In: a connection to a cluster whose StatefulSet controller is real. Out: for each LeaderWorkerSet the
objects that the real controller would make, with the same names, labels and variables. **It is not that
controller**: rollouts are left to the StatefulSet of leaders with its partition, maxUnavailable, surge and
status are not looked at, and what its webhooks put into pods is put into the templates here. What a test
shows with it is what the operator does, not what LeaderWorkerSet does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path
from typing import Any, Self

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from plimsoll_operator import cluster as api
from plimsoll_operator import names
from plimsoll_operator.cluster import ApiError, Cluster, Resource

Json = dict[str, Any]

POLL_SECONDS = 0.3
NAME = "leaderworkerset.sigs.k8s.io/name"
MANAGER = "lws"


class LeaderWorkerSets:
    """Looks after one namespace in a thread of its own, until the block ends."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._kubeconfig, self._namespace = kubeconfig, namespace
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        # Worker templates by the hash of their LeaderWorkerSet's template: real ones are revisions.
        self._templates: dict[str, Json] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        configuration = Configuration()
        await config.load_kube_config(
            config_file=os.fspath(self._kubeconfig), client_configuration=configuration
        )
        async with ApiClient(configuration) as connection:
            cluster = Cluster(connection)
            while not self._stop.is_set():
                # What changed meanwhile is looked at again.
                with contextlib.suppress(ApiError):
                    for body in await cluster.find(api.LEADER_WORKER_SET, self._namespace, ""):
                        await self._look_after(cluster, body)
                await asyncio.sleep(POLL_SECONDS)

    async def _look_after(self, cluster: Cluster, body: Json) -> None:
        name, template = body["metadata"]["name"], body["spec"]["leaderWorkerTemplate"]
        self._templates[_hash_of(template["workerTemplate"])] = template["workerTemplate"]
        await self._apply(cluster, api.SERVICE, _service(body))
        await self._apply(cluster, api.STATEFUL_SET, _leaders(body))
        pods = await cluster.find(api.POD, self._namespace, f"{NAME}={name}")
        for pod in pods:
            await self._label(cluster, pod)
        for leader in pods:
            if leader["metadata"]["labels"].get(names.WORKER_INDEX_LABEL) != "0":
                continue
            group = [pod for pod in pods if _group_of(pod) == _group_of(leader)]
            if "deletionTimestamp" in leader["metadata"]:
                continue
            if any(_restarted(pod) or "deletionTimestamp" in pod["metadata"] for pod in group):
                await self._delete(cluster, leader)
                continue
            worker = self._templates.get(_hash_of(leader))
            if worker is not None:
                await self._make_workers(cluster, body, leader, worker)

    async def _make_workers(
        self, cluster: Cluster, body: Json, leader: Json, template: Json
    ) -> None:
        """Only where there are none: those of a leader before go with it."""
        name = leader["metadata"]["name"]
        if await cluster.get(api.STATEFUL_SET, self._namespace, name) is None:
            wanted = _workers(body, leader, template)
            await self._apply(cluster, api.STATEFUL_SET, wanted)

    async def _label(self, cluster: Cluster, pod: Json) -> None:
        """As the webhook does when the pod is made."""
        index = pod["metadata"]["name"].rpartition("-")[2]
        labels = pod["metadata"]["labels"]
        key = names.WORKER_INDEX_LABEL
        if labels.get(key) == "0":
            key = names.GROUP_INDEX_LABEL
        if labels.get(key) is None:
            await cluster._request(
                "PATCH",
                api.POD.path(self._namespace, pod["metadata"]["name"]),
                query=[("fieldManager", MANAGER)],
                body={"metadata": {"labels": {key: index}}},
                content_type="application/merge-patch+json",
            )
            labels[key] = index

    async def _delete(self, cluster: Cluster, leader: Json) -> None:
        """With what depends on it, before it is gone itself."""
        metadata = leader["metadata"]
        await cluster._request(
            "DELETE",
            api.POD.path(self._namespace, metadata["name"]),
            body={"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Foreground"},
        )

    async def _apply(self, cluster: Cluster, resource: Resource, body: Json) -> None:
        await cluster._request(
            "PATCH",
            resource.path(self._namespace, body["metadata"]["name"]),
            query=[("fieldManager", MANAGER), ("force", "true")],
            body=body,
            content_type="application/apply-patch+yaml",
        )


def _service(body: Json) -> Json:
    """Names the pods, ready or not."""
    name = body["metadata"]["name"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "ownerReferences": [_owner(body)]},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {NAME: name},
        },
    }


def _leaders(body: Json) -> Json:
    spec, name = body["spec"], body["metadata"]["name"]
    labels = {NAME: name, names.WORKER_INDEX_LABEL: "0"}
    rolling = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
    own_name = {"name": "LWS_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    variables = [
        own_name,
        *_variables(f"$(LWS_POD).{name}.{body['metadata']['namespace']}", spec),
        {"name": "LWS_WORKER_INDEX", "value": "0"},
    ]
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "labels": {NAME: name}, "ownerReferences": [_owner(body)]},
        "spec": {
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "replicas": spec["replicas"],
            "selector": {"matchLabels": labels},
            "updateStrategy": {"rollingUpdate": {"partition": rolling["partition"]}},
            "template": _injected(
                spec["leaderWorkerTemplate"]["leaderTemplate"], labels, variables
            ),
        },
    }


def _workers(body: Json, leader: Json, template: Json) -> Json:
    spec, name = body["spec"], body["metadata"]["name"]
    labels = {NAME: name, names.GROUP_INDEX_LABEL: _group_of(leader)}
    address = f"{leader['metadata']['name']}.{name}.{body['metadata']['namespace']}"
    by_ordinal = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    variables = [*_variables(address, spec), {"name": "LWS_WORKER_INDEX", "valueFrom": by_ordinal}]
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {
            "name": leader["metadata"]["name"],
            "labels": labels,
            "ownerReferences": [_owner({"apiVersion": "v1", "kind": "Pod", **leader})],
        },
        "spec": {
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "replicas": spec["leaderWorkerTemplate"]["size"] - 1,
            "ordinals": {"start": 1},
            "selector": {"matchLabels": labels},
            "template": _injected(template, labels, variables),
        },
    }


def _variables(address: str, spec: Json) -> list[Json]:
    size = str(spec["leaderWorkerTemplate"]["size"])
    return [
        {"name": "LWS_LEADER_ADDRESS", "value": address},
        {"name": "LWS_GROUP_SIZE", "value": size},
    ]


def _injected(template: Json, labels: Json, variables: list[Json]) -> Json:
    """With the labels, and the variables first in every container, as the webhook has them."""
    metadata, spec = template["metadata"], dict(template["spec"])
    for part in ("containers", "initContainers"):
        if part in spec:
            spec[part] = [
                {**each, "env": [*variables, *each.get("env", [])]} for each in spec[part]
            ]
    return {"metadata": {**metadata, "labels": {**metadata["labels"], **labels}}, "spec": spec}


def _owner(body: Json) -> Json:
    return {
        "apiVersion": body["apiVersion"],
        "kind": body["kind"],
        "name": body["metadata"]["name"],
        "uid": body["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _hash_of(body: Json) -> str:
    return str(body["metadata"]["annotations"][names.TEMPLATE_ANNOTATION])


def _group_of(pod: Json) -> str | None:
    index: str | None = pod["metadata"]["labels"].get(names.GROUP_INDEX_LABEL)
    return index


def _restarted(pod: Json) -> bool:
    status = pod.get("status", {})
    containers = (*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ()))
    return any(each.get("restartCount", 0) > 0 for each in containers)
