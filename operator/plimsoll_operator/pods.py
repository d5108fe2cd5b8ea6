"""Pods as the API server has them, read into frozen values.

In: bodies. Out: :class:`Pod`, with the state of its engine's container and of the gate's. Pure.
"""

from __future__ import annotations

from plimsoll_operator import names
from plimsoll_operator.observed import Container, Disruption, Json, Pod, Termination, seconds


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
        unschedulable_since=_time(scheduled, "lastTransitionTime") if unschedulable else None,
        disruption=_read_disruption(status, conditions.get("DisruptionTarget", {})),
        container=read_container(body, names.ENGINE_CONTAINER),
        gate=read_container(body, names.GATE_CONTAINER),
    )


def _read_disruption(status: Json, target: Json) -> Disruption | None:
    if target.get("status") == "True":
        at = _time(target, "lastTransitionTime")
        return Disruption(target.get("reason", "Disrupted"), target.get("message", ""), at)
    # A kubelet that is short of something, or shuts down, may say so in the status alone.
    if status.get("phase") == "Failed" and "reason" in status:
        return Disruption(status["reason"], status.get("message", ""), None)
    return None


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


def _time(part: Json, field: str) -> float | None:
    return seconds(part[field]) if field in part else None


def _termination(terminated: Json) -> Termination:
    return Termination(
        reason=terminated.get("reason", "Error"),
        exit_code=terminated["exitCode"],
        message=terminated.get("message", ""),
        started_at=_time(terminated, "startedAt"),
        finished_at=_time(terminated, "finishedAt"),
    )


def controller_of(body: Json) -> Json:
    """The owner reference of what made it; {} where nothing did."""
    owners = body["metadata"].get("ownerReferences", [])
    return next((owner for owner in owners if owner.get("controller")), {})
