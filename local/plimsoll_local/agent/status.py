"""The status of a pod as its API object shows it.

In: the pod as API JSON, what is observed of it, the node's address and the time. Out: the status to
patch. Pure, and stable: conditions keep their times while they keep their status.
"""

from __future__ import annotations

from plimsoll_local.agent.api import Json
from plimsoll_local.agent.lifecycle import failed_init, is_deleted
from plimsoll_local.agent.logs import format_time
from plimsoll_local.agent.state import (
    ContainerState,
    Observed,
    PodContainers,
    Running,
    Terminated,
    Waiting,
    is_sidecar,
)


def api_time(seconds: float) -> str:
    """Unix seconds as the API writes times: whole seconds, UTC."""
    return format_time(seconds)[:19] + "Z"


def build_status(pod: Json, observed: Observed, host_ip: str, now: float) -> Json:
    containers = PodContainers.of(pod)
    status: Json = {
        "phase": pod_phase(pod, observed),
        "startTime": api_time(observed.started_at),
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        "conditions": _conditions(pod, observed, now),
        "containerStatuses": [_container_status(c, observed) for c in containers.main],
    }
    if containers.init:
        status["initContainerStatuses"] = [
            _container_status(c, observed, init=True) for c in containers.init
        ]
    if observed.pod_ip:
        status["podIP"] = observed.pod_ip
        status["podIPs"] = [{"ip": observed.pod_ip}]
    if generation := pod["metadata"].get("generation"):
        status["observedGeneration"] = generation
    if observed.failure is not None and observed.failure.reason:
        status["reason"] = observed.failure.reason
        status["message"] = observed.failure.message
    return status


def build_patch(pod: Json, status: Json) -> Json:
    """The strategic merge patch that gives a pod, and no other of its name, this status.

    Conditions are merged with those of other writers; addresses are replaced, since a pod that was
    run anew has another one."""
    addresses = [{"$patch": "replace"}, *status.get("podIPs", ())]
    return {
        "metadata": {"uid": pod["metadata"]["uid"]},
        "status": {**status, "podIPs": addresses} if "podIPs" in status else status,
    }


def pod_phase(pod: Json, observed: Observed) -> str:
    """The kubelet's rules: Pending until every container has been created once."""
    if observed.failure is not None or failed_init(pod, observed) is not None:
        return "Failed"
    if not is_initialised(pod, observed):
        return "Pending"
    policy = pod["spec"].get("restartPolicy", "Always")
    states = [observed.containers[c["name"]] for c in PodContainers.of(pod).main]
    if any(not s.attempted for s in states):
        return "Pending"
    ended = [s.state for s in states if isinstance(s.state, Terminated)]
    ends = policy != "Always" or is_deleted(pod)
    if len(ended) < len(states) or not ends:
        return "Running"
    if all(s.exit_code == 0 for s in ended):
        return "Succeeded"
    return "Failed" if policy == "Never" or is_deleted(pod) else "Running"


def is_initialised(pod: Json, observed: Observed) -> bool:
    """Whether every init container has done its part."""
    for container in PodContainers.of(pod).init:
        state = observed.containers[container["name"]]
        if is_sidecar(container):
            done = state.started or (state.attempted and _mains_attempted(pod, observed))
        else:
            done = isinstance(state.state, Terminated) and state.state.exit_code == 0
        if not done:
            return False
    return True


def _mains_attempted(pod: Json, observed: Observed) -> bool:
    return any(observed.containers[c["name"]].attempted for c in PodContainers.of(pod).main)


def _conditions(pod: Json, observed: Observed, now: float) -> list[Json]:
    previous = {c["type"]: c for c in pod.get("status", {}).get("conditions", ())}
    phase = pod_phase(pod, observed)
    unready = [
        c["name"] for c in PodContainers.of(pod).main if not observed.containers[c["name"]].ready
    ]
    ended = _ended_reason(phase)
    if ended:
        containers_ready = (False, ended, "")
    elif unready:
        message = f"containers with unready status: [{' '.join(unready)}]"
        containers_ready = (False, "ContainersNotReady", message)
    else:
        containers_ready = (True, "", "")

    gates = [
        gate["conditionType"]
        for gate in pod["spec"].get("readinessGates", ())
        if previous.get(gate["conditionType"], {}).get("status") != "True"
    ]
    ready = containers_ready
    if containers_ready[0] and gates:
        message = f'the status of pod readiness gate "{gates[0]}" is not "True"'
        ready = (False, "ReadinessGatesNotReady", message)

    if is_initialised(pod, observed) or phase == "Succeeded":
        initialised = (True, "PodCompleted" if phase == "Succeeded" else "", "")
    else:
        names = [c["name"] for c in PodContainers.of(pod).init]
        message = f"containers with incomplete status: [{' '.join(names)}]"
        initialised = (False, "ContainersNotInitialized", message)

    wanted = {
        "PodReadyToStartContainers": (observed.sandbox, "", ""),
        "Initialized": initialised,
        "Ready": ready,
        "ContainersReady": containers_ready,
        "PodScheduled": (True, "", ""),
    }
    generation = pod["metadata"].get("generation")
    return [
        _condition(kind, *value, previous.get(kind, {}), generation, now)
        for kind, value in wanted.items()
    ]


def _ended_reason(phase: str) -> str:
    return {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(phase, "")


def _condition(
    kind: str,
    holds: bool,
    reason: str,
    message: str,
    previous: Json,
    generation: int | None,
    now: float,
) -> Json:
    status = "True" if holds else "False"
    changed = previous.get("status") != status
    condition: Json = {
        "type": kind,
        "status": status,
        "lastProbeTime": None,
        "lastTransitionTime": api_time(now) if changed else previous.get("lastTransitionTime"),
        # Written even when empty: a strategic merge would keep the old text.
        "reason": reason or None,
        "message": message or None,
    }
    if generation:
        condition["observedGeneration"] = generation
    return condition


def _container_status(container: Json, observed: Observed, init: bool = False) -> Json:
    state = observed.containers[container["name"]]
    ready = state.ready
    if init and not is_sidecar(container):
        ready = isinstance(state.state, Terminated) and state.state.exit_code == 0
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": state.image_id,
        **({"containerID": state.container_id} if state.container_id else {}),
        "restartCount": state.restart_count,
        "ready": ready,
        "started": state.started,
        "state": _state(state),
        "lastState": {} if state.last is None else _terminated(state.last),
    }


def _state(container: ContainerState) -> Json:
    state = container.state
    if isinstance(state, Running):
        return {"running": {"startedAt": api_time(state.started_at)}}
    if isinstance(state, Waiting):
        waiting = {"reason": state.reason}
        if state.message:
            waiting["message"] = state.message
        return {"waiting": waiting}
    return _terminated(state)


def _terminated(state: Terminated) -> Json:
    terminated = {
        "exitCode": state.exit_code,
        "reason": state.reason,
        "startedAt": api_time(state.started_at),
        "finishedAt": api_time(state.finished_at),
        "containerID": state.container_id,
    }
    if state.message:
        terminated["message"] = state.message
    return {"terminated": terminated}
