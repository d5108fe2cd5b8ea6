"""Reads one LLMDeployment with its children and pods into an :class:`Observed`.

In: the cluster. Out: frozen values; nothing is written and nothing is judged here. The parsers
are pure, so that tests and the checks can use pods as the API server has them.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plimsoll_operator import cluster as api
from plimsoll_operator import names
from plimsoll_operator.avoidance import as_one
from plimsoll_operator.cluster import ApiError, Cluster, Resource
from plimsoll_operator.credentials import are_usable
from plimsoll_operator.groups import read_groups, read_leader_worker_set
from plimsoll_operator.observed import (
    Credentials,
    Json,
    Observed,
    Pod,
    StatefulSet,
    Unusable,
    read_status,
    seconds,
)
from plimsoll_operator.ownership import applied_at, foreign_fields
from plimsoll_operator.plan.capacity import find_room
from plimsoll_operator.pods import controller_of, read_pod
from plimsoll_operator.spec import Deployment, RolloutType
from plimsoll_operator.tuning.profile import profile_key
from plimsoll_operator.watch_cache import Reader


def children(
    deployment: str, *, prefetch: bool, groups: bool = False
) -> tuple[tuple[Resource, str], ...]:
    """Every object that one deployment may own; a Job only where there is, or was, one to fetch the
    model, a LeaderWorkerSet only where there may be one."""
    return (
        *([(api.LEADER_WORKER_SET, names.group(deployment))] if groups else []),
        *([(api.JOB, names.prefetch_job(deployment))] if prefetch else []),
        (api.SECRET, names.control_secret(deployment)),
        (api.CONFIG_MAP, names.limits_config_map(deployment)),
        (api.SERVICE, names.headless_service(deployment)),
        (api.SERVICE, deployment),
        (api.DISRUPTION_BUDGET, deployment),
        (api.NETWORK_POLICY, deployment),
        (api.STATEFUL_SET, deployment),
    )


async def observe(reader: Reader, cluster: Cluster, resource: Json, engine_image: str) -> Observed:
    """``resource`` is the LLMDeployment just read, ``engine_image`` the default for its pods. ``reader``
    may remember the children; what is not labelled as one is read from ``cluster``. Raises
    spec.InvalidSpec."""
    deployment = Deployment.parse(resource)
    namespace = deployment.namespace
    fetches = deployment.model.cache.prefetch
    fetched = bool(read_status(resource).get("prefetch"))
    wanted = children(deployment.name, prefetch=fetches or fetched, groups=deployment.in_groups)
    profile_name = profile_key(deployment, deployment.image or engine_image).name
    bodies, profile, pods = await asyncio.gather(
        asyncio.gather(*(reader.get(kind, namespace, name) for kind, name in wanted)),
        reader.get(api.MEMORY_PROFILE, namespace, profile_name),
        reader.find(api.POD, namespace, names.label_selector(names.selector(deployment.name))),
    )
    found = {(kind.kind, name): body for (kind, name), body in zip(wanted, bodies, strict=True)}
    secret = found[api.SECRET.kind, names.control_secret(deployment.name)]
    group = (api.LEADER_WORKER_SET.kind, names.group(deployment.name))
    if not deployment.in_groups and found[api.STATEFUL_SET.kind, deployment.name] is None:
        # It may have been in groups before.
        found[group] = await cluster.get(api.LEADER_WORKER_SET, namespace, group[1])
    unusable: dict[str, Unusable] = {}
    if deployment.endpoint_picker is not None or "inferencePool" in read_status(resource):
        pool = await _observe_pool(cluster, namespace, deployment.name)
        if not isinstance(pool, Unusable):
            found[api.INFERENCE_POOL.kind, deployment.name] = pool
        elif deployment.endpoint_picker is not None:
            unusable[api.INFERENCE_POOL.kind] = pool
    if deployment.in_groups:
        statefulset, parsed = await _observe_groups(cluster, resource, deployment, found, pods)
        if statefulset is None and not await cluster.serves(api.LEADER_WORKER_SET):
            unusable[api.LEADER_WORKER_SET.kind] = Unusable.NOT_INSTALLED
    else:
        statefulset, parsed = _observe_pods(found[api.STATEFUL_SET.kind, deployment.name], pods)
    return Observed(
        deployment=deployment,
        resource=resource,
        changed_at=_changed_at(resource),
        children=found,
        statefulset=statefulset,
        pods=tuple(sorted(parsed, key=lambda pod: pod.ordinal)),
        credentials=None if secret is None else read_credentials(secret),
        profile=profile,
        prefetch_pods=await _pods_of_prefetch(reader, deployment) if fetches else (),
        unusable=unusable,
    )


async def _observe_pool(cluster: Cluster, namespace: str, name: str) -> Json | Unusable | None:
    found: Json | Unusable | None
    try:
        found = await cluster.get(api.INFERENCE_POOL, namespace, name)
    except ApiError as error:
        # Whether there is such a kind is not told to who may not read it.
        if error.status != 403:
            raise
        found = Unusable.FORBIDDEN
    if isinstance(found, dict) or await cluster.serves(api.INFERENCE_POOL):
        return found
    return Unusable.NOT_INSTALLED


def _observe_pods(
    statefulset: Json | None, pods: Iterable[Json]
) -> tuple[StatefulSet | None, tuple[Pod, ...]]:
    """Somebody else's pods may carry our labels; a predecessor's may still be going away."""
    if statefulset is None:
        return None, ()
    uid = statefulset["metadata"]["uid"]
    own = tuple(read_pod(pod) for pod in pods if controller_of(pod).get("uid") == uid)
    return as_one(read_statefulset(statefulset), own)


async def _observe_groups(
    cluster: Cluster,
    resource: Json,
    deployment: Deployment,
    found: Mapping[tuple[str, str], Json | None],
    pods: Iterable[Json],
) -> tuple[StatefulSet | None, tuple[Pod, ...]]:
    name = names.group(deployment.name)
    body = found[api.LEADER_WORKER_SET.kind, name]
    if body is None:
        return None, ()
    leaders = await cluster.get(api.STATEFUL_SET, deployment.namespace, name)
    if leaders is not None and controller_of(leaders).get("uid") != body["metadata"]["uid"]:
        leaders = None
    groups = read_groups(pods, leaders, deployment.nodes)
    recorded = read_status(resource).get("revision", {}).get("current")
    return read_leader_worker_set(body, leaders, groups, recorded), groups


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
    if deployment.in_groups:
        return Spare(False, "a group more is started with spec.rollout.type SurgeFirst alone")
    if deployment.accelerator is None:
        return Spare(False, "on CPU a surge is made with spec.rollout.type SurgeFirst alone")
    what = f"{deployment.ranks_per_pod} x {deployment.accelerator}"
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


def _names_in(annotation: str | None) -> tuple[str, ...]:
    return tuple(annotation.split(",")) if annotation else ()


def read_statefulset(body: Json) -> StatefulSet:
    spec, status, applied = body["spec"], body.get("status", {}), applied_at(body)
    update = spec.get("updateStrategy", {})
    annotations = body["metadata"].get("annotations", {})
    return StatefulSet(
        replicas=spec.get("replicas", 1),
        partition=update.get("rollingUpdate", {}).get("partition", 0),
        generation=body["metadata"]["generation"],
        observed_generation=status.get("observedGeneration", 0),
        current_revision=status.get("currentRevision", ""),
        update_revision=status.get("updateRevision", ""),
        template_hash=annotations.get(names.TEMPLATE_ANNOTATION),
        avoided=_names_in(annotations.get(names.AVOIDED_NODES)),
        alike=_names_in(annotations.get(names.ALIKE_REVISIONS)),
        on_delete=update.get("type") == "OnDelete",
        foreign=bool(foreign_fields(body)),
        applied_at=None if applied is None else seconds(applied),
    )


def read_credentials(secret: Json) -> Credentials | None:
    """None when a part is missing or damaged: then new ones have to be made."""
    data = secret.get("data") or {}
    try:
        certificate, key, token = (
            base64.b64decode(data[name], validate=True) for name in ("tls.crt", "tls.key", "token")
        )
        group, *before = (
            base64.b64decode(data.get(name, ""), validate=True)
            for name in (names.GROUP_TOKEN_KEY, names.PREVIOUS_CERTIFICATE, names.PREVIOUS_TOKEN)
        )
    except (KeyError, TypeError, ValueError):
        return None
    previous = Credentials(before[0], b"", before[1]) if all(before) else None
    found = Credentials(certificate, key, token, group, previous)
    return found if are_usable(found) else None


def read_key(secret: Json, key: str) -> str | None:
    """One value of a Secret; None where it is missing or no text."""
    try:
        return base64.b64decode((secret.get("data") or {})[key], validate=True).decode().strip()
    except (KeyError, TypeError, ValueError):
        return None


def _changed_at(resource: Json) -> float:
    """When anybody last wrote the object, status aside: there a rollout's deadline begins."""
    metadata = resource["metadata"]
    times = [
        seconds(entry["time"])
        for entry in metadata.get("managedFields", [])
        if entry.get("subresource") != "status" and "time" in entry
    ]
    return max(times, default=seconds(metadata["creationTimestamp"]))
