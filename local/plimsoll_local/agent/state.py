"""What the agent has observed of a pod and its containers: plain frozen values.

Times are Unix seconds. Everything a status or a decision is made from is here; handles of running
processes are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from plimsoll_local.agent.api import Json
from plimsoll_local.agent.logs import parse_time


@dataclass(frozen=True)
class Waiting:
    reason: str
    message: str = ""


@dataclass(frozen=True)
class Running:
    started_at: float


@dataclass(frozen=True)
class Terminated:
    exit_code: int
    reason: str
    message: str
    started_at: float
    finished_at: float
    container_id: str


@dataclass(frozen=True)
class BackOff:
    """A growing delay: ``delay`` seconds were given out at the time ``since``."""

    delay: float
    since: float


@dataclass(frozen=True)
class ContainerState:
    """One container. ``starting`` and ``stopping`` say that the agent is at work on it.

    ``retry_at`` is when a waiting container may be tried again, None for at once. ``started`` means
    that it runs and its startup probe, if any, has passed; ``ready`` that it may receive traffic.
    """

    state: Waiting | Running | Terminated
    last: Terminated | None = None
    restart_count: int = 0
    container_id: str = ""
    image_id: str = ""
    starting: bool = False
    stopping: bool = False
    started: bool = False
    ready: bool = False
    retry_at: float | None = None
    crash_back_off: BackOff | None = None
    pull_back_off: BackOff | None = None

    @property
    def alive(self) -> bool:
        """Whether there is, or may soon be, a process."""
        return self.starting or isinstance(self.state, Running)

    @property
    def attempted(self) -> bool:
        """Whether it has run at least once."""
        return self.last is not None or not isinstance(self.state, Waiting)


@dataclass(frozen=True)
class Failure:
    """Why the pod as a whole must end."""

    reason: str
    message: str


@dataclass(frozen=True)
class Observed:
    """A pod as the agent sees it. ``sandbox`` is whether its network and volumes are there,
    ``retry_at`` when setting them up may be tried again after a failure."""

    containers: Mapping[str, ContainerState]
    started_at: float
    sandbox: bool = False
    preparing: bool = False
    retry_at: float | None = None
    pod_ip: str | None = None
    failure: Failure | None = None

    def with_container(self, name: str, state: ContainerState) -> Observed:
        return replace(self, containers={**self.containers, name: state})


@dataclass(frozen=True)
class PodContainers:
    """The containers of a pod spec by their part: plain init containers run to their end one after
    the other, sidecars (init containers that always restart) stay, mains are the rest."""

    init: tuple[Json, ...]
    main: tuple[Json, ...]
    by_name: Mapping[str, Json] = field(default_factory=dict)

    @classmethod
    def of(cls, pod: Json) -> PodContainers:
        init = tuple(pod["spec"].get("initContainers", ()))
        main = tuple(pod["spec"]["containers"])
        return cls(init, main, {c["name"]: c for c in (*init, *main)})


def is_sidecar(container: Json) -> bool:
    """For an init container: whether it keeps running beside the mains."""
    return container.get("restartPolicy") == "Always"


def initial_waiting(pod: Json) -> Waiting:
    return Waiting("PodInitializing" if pod["spec"].get("initContainers") else "ContainerCreating")


def observe_new(pod: Json, now: float) -> Observed:
    """The state of a pod that this agent has not run yet, from the status it already has.

    Whatever ran before runs no more: it was a child of an earlier agent, and so ended with it.
    """
    status = pod.get("status", {})
    known = {
        entry["name"]: entry
        for entry in (
            *status.get("initContainerStatuses", ()),
            *status.get("containerStatuses", ()),
        )
    }
    containers = PodContainers.of(pod)
    terminal = status.get("phase") in ("Succeeded", "Failed")
    states = {}
    for name in containers.by_name:
        state = _restore(known.get(name, {}), initial_waiting(pod), now)
        is_init = any(c["name"] == name for c in containers.init)
        if is_init and not terminal and isinstance(state.state, Terminated):
            # A new sandbox is initialised anew.
            state = replace(state, state=initial_waiting(pod), last=state.state)
        states[name] = state
    started = status.get("startTime")
    return Observed(
        containers=states,
        started_at=parse_time(started) if started else now,
        pod_ip=status.get("podIP"),
        failure=Failure(status.get("reason", ""), status.get("message", ""))
        if status.get("phase") == "Failed"
        else None,
    )


def _restore(entry: Json, waiting: Waiting, now: float) -> ContainerState:
    state: Waiting | Running | Terminated = waiting
    if running := entry.get("state", {}).get("running"):
        started = running.get("startedAt")
        state = Terminated(
            exit_code=255,
            reason="Unknown",
            message="The node agent that ran this container has ended, and the container with it",
            started_at=parse_time(started) if started else now,
            finished_at=now,
            container_id=entry.get("containerID", ""),
        )
    elif terminated := entry.get("state", {}).get("terminated"):
        state = _read_terminated(terminated)
    last = entry.get("lastState", {}).get("terminated")
    return ContainerState(
        state=state,
        last=_read_terminated(last) if last else None,
        restart_count=entry.get("restartCount", 0),
        container_id=entry.get("containerID", ""),
        image_id=entry.get("imageID", ""),
    )


def _read_terminated(entry: Json) -> Terminated:
    return Terminated(
        exit_code=entry["exitCode"],
        reason=entry.get("reason", ""),
        message=entry.get("message", ""),
        started_at=parse_time(entry["startedAt"]) if entry.get("startedAt") else 0.0,
        finished_at=parse_time(entry["finishedAt"]) if entry.get("finishedAt") else 0.0,
        container_id=entry.get("containerID", ""),
    )
