"""Reads one LLMDeployment with its children and pods into an :class:`Observed`.

In: the cluster. Out: frozen values; nothing is written and nothing is judged here. The parsers
are pure, so that tests and the checks can use pods as the API server has them.
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from datetime import datetime

from plimsoll_operator import cluster as api
from plimsoll_operator import names
from plimsoll_operator.cluster import ApiError, Cluster, Resource
from plimsoll_operator.credentials import are_usable
from plimsoll_operator.observed import (
    Container,
    Credentials,
    Json,
    Observed,
    Pod,
    StatefulSet,
    Termination,
    read_status,
)
from plimsoll_operator.ownership import foreign_fields
from plimsoll_operator.plan.capacity import find_room
from plimsoll_operator.spec import Deployment, RolloutType
from plimsoll_operator.tuning.profile import profile_key
from plimsoll_operator.watch_cache import Reader


def children(deployment: str, *, prefetch: bool) -> tuple[tuple[Resource, str], ...]:
    """Every object that one deployment may own; a Job only where there is, or was, one to fetch the
    model."""
    return (
        *([(api.JOB, names.prefetch_job(deployment))] if prefetch else []),
        (api.SECRET, names.control_secret(deployment)),
        (api.CONFIG_MAP, names.limits_config_map(deployment)),
        (api.SERVICE, names.headless_service(deployment)),
        (api.SERVICE, deployment),
        (api.DISRUPTION_BUDGET, deployment),
        (api.NETWORK_POLICY, deployment),
        (api.STATEFUL_SET, deployment),
    )


async def observe(reader: Reader, resource: Json, engine_image: str) -> Observed:
    """``resource`` is the LLMDeployment just read, ``engine_image`` the default for its pods.
    Raises spec.InvalidSpec."""
    deployment = Deployment.parse(resource)
    namespace = deployment.namespace
    fetches = deployment.model.cache.prefetch
    fetched = bool(read_status(resource).get("prefetch"))
    wanted = children(deployment.name, prefetch=fetches or fetched)
    profile_name = profile_key(deployment, deployment.image or engine_image).name
    bodies, profile, pods = await asyncio.gather(
        asyncio.gather(*(reader.get(kind, namespace, name) for kind, name in wanted)),
        reader.get(api.MEMORY_PROFILE, namespace, profile_name),
        reader.find(api.POD, namespace, names.label_selector(names.selector(deployment.name))),
    )
    found = {(kind.kind, name): body for (kind, name), body in zip(wanted, bodies, strict=True)}
    statefulset = found[api.STATEFUL_SET.kind, deployment.name]
    secret = found[api.SECRET.kind, names.control_secret(deployment.name)]
    parsed = (read_pod(pod) for pod in pods if _controlled_by(pod, statefulset))
    return Observed(
        deployment=deployment,
        resource=resource,
        changed_at=_changed_at(resource),
        children=found,
        statefulset=None if statefulset is None else read_statefulset(statefulset),
        pods=tuple(sorted(parsed, key=lambda pod: pod.ordinal)),
        credentials=None if secret is None else read_credentials(secret),
        profile=profile,
        prefetch_pods=await _pods_of_prefetch(reader, deployment) if fetches else (),
    )


async def _pods_of_prefetch(reader: Reader, deployment: Deployment) -> tuple[Json, ...]:
    labels = names.label_selector(names.prefetch_labels(deployment.name))
    return tuple(await reader.find(api.POD, deployment.namespace, labels))


@dataclass(frozen=True)
class Spare:
    """Whether one more replica fits now, and why it is thought so."""

    fits: bool
    reason: str


async def observe_spare(cluster: Cluster, deployment: Deployment, template: Json) -> Spare:
    """For a rollout of type Auto that begins. Nodes are read then alone; on CPU nothing is counted that
    one could be sure of."""
    kind = deployment.rollout_type
    if kind is not RolloutType.AUTO:
        return Spare(False, f"spec.rollout.type is {kind}")
    if deployment.accelerator is None:
        return Spare(False, "on CPU a surge is made with spec.rollout.type SurgeFirst alone")
    what = f"{deployment.tensor_parallel_size} x {deployment.accelerator}"
    try:
        nodes, pods = await asyncio.gather(
            cluster.find_everywhere(api.NODE),
            cluster.find_everywhere(api.POD, "status.phase!=Succeeded,status.phase!=Failed"),
        )
    except ApiError as error:
        if error.status != 403:
            raise
        return Spare(False, f"the nodes may not be read, so nobody knows of {what} to spare")
    node = find_room(nodes, pods, template)
    if node is None:
        return Spare(False, f"no node has {what} to spare")
    return Spare(True, f"node {node} has {what} to spare")


def read_statefulset(body: Json) -> StatefulSet:
    spec, status = body["spec"], body.get("status", {})
    update = spec.get("updateStrategy", {})
    return StatefulSet(
        replicas=spec.get("replicas", 1),
        partition=update.get("rollingUpdate", {}).get("partition", 0),
        generation=body["metadata"]["generation"],
        observed_generation=status.get("observedGeneration", 0),
        current_revision=status.get("currentRevision", ""),
        update_revision=status.get("updateRevision", ""),
        template_hash=body["metadata"].get("annotations", {}).get(names.TEMPLATE_ANNOTATION),
        on_delete=update.get("type") == "OnDelete",
        foreign=bool(foreign_fields(body)),
    )


def read_pod(body: Json, ordinal: int | None = None) -> Pod:
    """One pod with the state of its engine container; ``ordinal`` None: by its name, as a
    StatefulSet's."""
    metadata, status = body["metadata"], body.get("status", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
    ready, scheduled = conditions.get("Ready", {}), conditions.get("PodScheduled", {})
    is_ready = ready.get("status") == "True"
    unschedulable = scheduled.get("reason") == "Unschedulable"
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        ordinal=int(metadata["name"].rpartition("-")[2]) if ordinal is None else ordinal,
        ip=status.get("podIP"),
        node=body.get("spec", {}).get("nodeName"),
        revision=metadata.get("labels", {}).get("controller-revision-hash", ""),
        created_at=seconds(metadata["creationTimestamp"]),
        deleting="deletionTimestamp" in metadata,
        ready=is_ready,
        ready_since=seconds(ready["lastTransitionTime"]) if is_ready else None,
        phase=status.get("phase", "Pending"),
        unschedulable=scheduled.get("message", "no node fits") if unschedulable else None,
        container=read_container(body, names.ENGINE_CONTAINER),
        gate=read_container(body, names.GATE_CONTAINER),
    )


def read_container(body: Json, name: str) -> Container | None:
    """The state of one container of a pod, a native sidecar's too; None before the kubelet has told
    of it."""
    memory_limit, status = _memory_limit(body, name), body.get("status", {})
    for container in (
        *status.get("containerStatuses", ()),
        *status.get("initContainerStatuses", ()),
    ):
        if container["name"] == name:
            state, last = container.get("state", {}), container.get("lastState", {})
            ended = state.get("terminated")
            waiting = state.get("waiting")
            terminated = ended or last.get("terminated")
            return Container(
                image=container.get("image", ""),
                ready=container.get("ready", False),
                started=bool(container.get("started")) and "running" in state,
                restarts=container.get("restartCount", 0),
                waiting=None if waiting is None else waiting.get("reason", "Waiting"),
                waiting_message=None if waiting is None else waiting.get("message"),
                ended=ended is not None,
                termination=None if terminated is None else _termination(terminated),
                memory_limit=memory_limit,
            )
    return None


def _memory_limit(body: Json, name: str) -> str | None:
    spec = body.get("spec", {})
    for container in (*spec.get("containers", ()), *spec.get("initContainers", ())):
        if container["name"] == name:
            limit = container.get("resources", {}).get("limits", {}).get("memory")
            return None if limit is None else str(limit)
    return None


def _termination(terminated: Json) -> Termination:
    started, finished = terminated.get("startedAt"), terminated.get("finishedAt")
    return Termination(
        reason=terminated.get("reason", "Error"),
        exit_code=terminated["exitCode"],
        message=terminated.get("message", ""),
        started_at=None if started is None else seconds(started),
        finished_at=None if finished is None else seconds(finished),
    )


def read_credentials(secret: Json) -> Credentials | None:
    """None when a part is missing or damaged: then new ones have to be made."""
    data = secret.get("data") or {}
    try:
        certificate, key, token = (
            base64.b64decode(data[name], validate=True) for name in ("tls.crt", "tls.key", "token")
        )
    except (KeyError, TypeError, ValueError):
        return None
    found = Credentials(certificate, key, token)
    return found if are_usable(found) else None


def read_key(secret: Json, key: str) -> str | None:
    """One value of a Secret; None where it is missing or no text."""
    try:
        return base64.b64decode((secret.get("data") or {})[key], validate=True).decode().strip()
    except (KeyError, TypeError, ValueError):
        return None


def _controlled_by(pod: Json, statefulset: Json | None) -> bool:
    """Somebody else's pods may carry our labels; a predecessor's may still be going away."""
    if statefulset is None:
        return False
    uid = statefulset["metadata"]["uid"]
    owners = pod["metadata"].get("ownerReferences", [])
    return any(owner.get("controller") and owner["uid"] == uid for owner in owners)


def _changed_at(resource: Json) -> float:
    """When anybody last wrote the object, status aside: there a rollout's deadline begins."""
    metadata = resource["metadata"]
    times = [
        seconds(entry["time"])
        for entry in metadata.get("managedFields", [])
        if entry.get("subresource") != "status" and "time" in entry
    ]
    return max(times, default=seconds(metadata["creationTimestamp"]))


def seconds(timestamp: str) -> float:
    """An RFC 3339 time of the API server as Unix seconds."""
    return datetime.fromisoformat(timestamp).timestamp()
