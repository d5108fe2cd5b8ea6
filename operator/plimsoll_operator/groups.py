"""A LeaderWorkerSet and its pods, read as the StatefulSet and the pods that plan and checks know.

In: bodies as the API server has them. Out: frozen values; nothing is judged. A replica is a
group: its leader's pod stands for it, with the others as ``members``. LeaderWorkerSet makes a
StatefulSet of leaders under its own name, and one of workers, named like the leader's pod, for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from plimsoll_operator import names
from plimsoll_operator.observed import Json, Pod, StatefulSet, seconds
from plimsoll_operator.ownership import applied_at, foreign_fields
from plimsoll_operator.pods import controller_of, read_pod


def read_groups(pods: Iterable[Json], leaders: Json | None, size: int) -> tuple[Pod, ...]:
    """Each group whose leader exists, by its index. ``leaders`` is the StatefulSet of leaders."""
    pods = tuple(pods)
    if leaders is None:
        return ()
    uid = leaders["metadata"]["uid"]
    return tuple(
        read_group(pod, (each for each in pods if _follows(each, pod)), size)
        for pod in pods
        if controller_of(pod).get("uid") == uid
    )


def read_group(leader: Json, workers: Iterable[Json], size: int) -> Pod:
    """Ready when all of its pods are there and ready."""
    first = _read_member(leader, int(leader["metadata"]["name"].rpartition("-")[2]))
    members = tuple(
        sorted((_read_member(pod) for pod in workers), key=lambda member: member.ordinal)
    )
    whole = (first, *members)
    ready = len(whole) == size and all(pod.ready and not pod.deleting for pod in whole)
    since = [pod.ready_since for pod in whole if pod.ready_since is not None]
    homeless = [pod for pod in members if pod.unschedulable is not None]
    unschedulable = first.unschedulable
    if unschedulable is None and homeless:
        unschedulable = f"pod {homeless[0].name}: {homeless[0].unschedulable}"
    return replace(
        first,
        members=members,
        ready=ready,
        ready_since=max(since) if ready else None,
        unschedulable=unschedulable,
    )


def read_leader_worker_set(
    body: Json, leaders: Json | None, groups: Iterable[Pod], recorded: str | None
) -> StatefulSet:
    """``recorded`` is the current revision by status: LeaderWorkerSet has none, and while a pod is
    away the others alone do not tell it."""
    spec, metadata = body["spec"], body["metadata"]
    template = metadata.get("annotations", {}).get(names.TEMPLATE_ANNOTATION)
    name = metadata["labels"][names.DEPLOYMENT_LABEL]
    update = names.group_revision(name, template or "")
    rolling = spec.get("rolloutStrategy", {}).get("rollingUpdateConfiguration", {})
    replicas, partition = spec.get("replicas", 1), rolling.get("partition", 0)
    there = [group for group in groups if not group.deleting]
    old = [group.revision for group in there if group.revision != update]
    if old:
        current = old[0]
    elif len(there) >= replicas or not (recorded or "").startswith(f"{names.group(name)}-"):
        current = update
    else:
        current = str(recorded)
    generation, applied = metadata["generation"], applied_at(body)
    return StatefulSet(
        replicas=replicas,
        partition=partition,
        generation=generation,
        observed_generation=generation
        if _is_followed(leaders, replicas, partition, template)
        else generation - 1,
        current_revision=current,
        update_revision=update,
        template_hash=template,
        foreign=bool(foreign_fields(body)),
        applied_at=None if applied is None else seconds(applied),
    )


def _is_followed(leaders: Json | None, replicas: int, partition: int, template: str | None) -> bool:
    """The controller has seen the LeaderWorkerSet as it is, and the StatefulSet controller what it made
    of that: LeaderWorkerSet has no observedGeneration."""
    if leaders is None:
        return False
    spec = leaders["spec"]
    held = spec.get("updateStrategy", {}).get("rollingUpdate", {}).get("partition", 0)
    annotations = spec["template"]["metadata"].get("annotations", {})
    return bool(
        spec.get("replicas", 1) == replicas
        and held >= partition
        and annotations.get(names.TEMPLATE_ANNOTATION) == template
        and leaders.get("status", {}).get("observedGeneration", 0)
        >= leaders["metadata"]["generation"]
    )


def _read_member(body: Json, ordinal: int | None = None) -> Pod:
    """A group is deleted as soon as one of its containers has restarted: what ended before that did
    not end because of it."""
    pod = read_pod(body, ordinal)
    metadata = body["metadata"]
    template = metadata.get("annotations", {}).get(names.TEMPLATE_ANNOTATION, "")
    deployment = metadata.get("labels", {}).get(names.DEPLOYMENT_LABEL, "")
    revision = names.group_revision(deployment, template)
    return replace(pod, revision=revision, ended_before=_ended_before(metadata, pod))


def _ended_before(metadata: Json, pod: Pod) -> bool:
    end = None if pod.container is None else pod.container.termination
    if not pod.deleting or end is None or end.finished_at is None:
        return False
    asked = seconds(metadata["deletionTimestamp"]) - metadata.get("deletionGracePeriodSeconds", 0)
    return bool(end.finished_at <= asked)


def _follows(pod: Json, leader: Json) -> bool:
    """Its worker: of the StatefulSet that is named like the leader's pod, in the same group."""
    owner, index = controller_of(pod), names.GROUP_INDEX_LABEL
    labels, of_leader = pod["metadata"].get("labels", {}), leader["metadata"].get("labels", {})
    return bool(
        owner.get("kind") == "StatefulSet"
        and owner.get("name") == leader["metadata"]["name"]
        and labels.get(index) == of_leader.get(index)
    )
