"""What the agent should do next for one pod.

In: the pod as API JSON, what is observed of it, and the time. Out: actions, and when to look again
if nothing happens before. Pure: the same function serves a fresh pod, a crashed container, a
deletion and an agent that has just started.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plimsoll_local.agent.api import Json
from plimsoll_local.agent.back_off import BackOffPolicy
from plimsoll_local.agent.state import (
    ContainerState,
    Failure,
    Observed,
    PodContainers,
    Running,
    Terminated,
    Waiting,
    is_sidecar,
)

DEFAULT_GRACE = 30.0


@dataclass(frozen=True)
class PrepareSandbox:
    """Make the pod's network and volumes."""


@dataclass(frozen=True)
class StartContainer:
    name: str


@dataclass(frozen=True)
class BackOffContainer:
    """A container waits until the time given before it is started again."""

    name: str
    until: float
    delay: float


@dataclass(frozen=True)
class StopContainer:
    """End a container within ``grace`` seconds; ``reason`` is for the event."""

    name: str
    grace: float
    reason: str


@dataclass(frozen=True)
class FailPod:
    failure: Failure


@dataclass(frozen=True)
class ReleaseSandbox:
    """The pod has ended: give its network back."""


@dataclass(frozen=True)
class RemovePod:
    """Nothing runs any more and deletion was asked for: delete the API object."""


Action = (
    PrepareSandbox
    | StartContainer
    | BackOffContainer
    | StopContainer
    | FailPod
    | ReleaseSandbox
    | RemovePod
)


@dataclass(frozen=True)
class Plan:
    actions: tuple[Action, ...] = ()
    wake_at: float | None = None


def is_deleted(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def termination_grace(pod: Json) -> float:
    """Seconds between asking a container to end and killing it."""
    meta = pod["metadata"]
    grace = meta.get("deletionGracePeriodSeconds")
    if grace is None:
        grace = pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE)
    return float(grace)


def restarts(policy: str, state: Terminated) -> bool:
    """Whether the pod's restart policy starts an ended container again."""
    return policy == "Always" or (policy == "OnFailure" and state.exit_code != 0)


def failed_init(pod: Json, observed: Observed) -> Terminated | None:
    """The init container that ended the pod, if one did: it failed and is not restarted."""
    policy = pod["spec"].get("restartPolicy", "Always")
    for container in PodContainers.of(pod).init:
        state = observed.containers[container["name"]].state
        if (
            isinstance(state, Terminated)
            and state.exit_code != 0
            and not is_sidecar(container)
            and not restarts(policy, state)
        ):
            return state
    return None


def has_ended(pod: Json, observed: Observed) -> bool:
    """Whether the pod's work is over: failed, or every main container has ended for good."""
    if observed.failure is not None or failed_init(pod, observed) is not None:
        return True
    policy = pod["spec"].get("restartPolicy", "Always")
    states = [observed.containers[c["name"]].state for c in PodContainers.of(pod).main]
    return all(isinstance(s, Terminated) and not restarts(policy, s) for s in states)


def next_actions(pod: Json, observed: Observed, now: float, policy: BackOffPolicy) -> Plan:
    """The next step for the pod. An order given in ``observed`` as under way is not given again."""
    deadline = _deadline(pod, observed)
    if deadline is not None and not has_ended(pod, observed) and now >= deadline:
        message = "Pod was active on the node longer than the specified deadline"
        return Plan((FailPod(Failure("DeadlineExceeded", message)),))
    if is_deleted(pod) or has_ended(pod, observed):
        return _wind_up(pod, observed)
    if not observed.sandbox:
        if observed.preparing:
            return Plan()
        if observed.retry_at is not None and now < observed.retry_at:
            return Plan(wake_at=observed.retry_at)
        return Plan((PrepareSandbox(),))
    plan = _run(pod, observed, now, policy)
    times = [t for t in (plan.wake_at, deadline) if t is not None]
    return Plan(plan.actions, min(times, default=None))


def _deadline(pod: Json, observed: Observed) -> float | None:
    seconds = pod["spec"].get("activeDeadlineSeconds")
    return None if seconds is None else observed.started_at + float(seconds)


def _wind_up(pod: Json, observed: Observed) -> Plan:
    """Mains first, then sidecars, last started first; then the sandbox, then the object."""
    containers = PodContainers.of(pod)
    sidecars = [c["name"] for c in containers.init if is_sidecar(c)]
    others = [name for name in containers.by_name if name not in sidecars]
    grace = termination_grace(pod)
    if observed.preparing:
        return Plan()
    for names in (others, *([name] for name in reversed(sidecars))):
        if any(observed.containers[name].alive for name in names):
            return Plan(tuple(_stops(names, observed, grace)))
    if is_deleted(pod):
        return Plan((RemovePod(),))
    if observed.sandbox:
        return Plan((ReleaseSandbox(),))
    return Plan()


def _stops(names: Iterable[str], observed: Observed, grace: float) -> Iterable[StopContainer]:
    # Stopping what is being stopped is no harm: it can only become sooner, as kubectl delete
    # --grace-period asks for.
    for name in names:
        if isinstance(observed.containers[name].state, Running):
            yield StopContainer(name, grace, "")


def _run(pod: Json, observed: Observed, now: float, policy: BackOffPolicy) -> Plan:
    containers = PodContainers.of(pod)
    restart_policy = pod["spec"].get("restartPolicy", "Always")
    actions: list[Action] = []
    times: list[float] = []

    def advance(name: str, container_policy: str) -> None:
        action, wake_at = _advance(name, observed.containers[name], container_policy, now, policy)
        if action is not None:
            actions.append(action)
        if wake_at is not None:
            times.append(wake_at)

    initialised = True
    for container in containers.init:
        name = container["name"]
        state = observed.containers[name]
        if is_sidecar(container):
            advance(name, "Always")
            if state.started:
                continue
        else:
            if isinstance(state.state, Terminated) and state.state.exit_code == 0:
                continue
            # An init container that failed is tried again unless the pod never restarts.
            advance(name, "OnFailure" if restart_policy == "Always" else restart_policy)
        initialised = False
        break
    if initialised:
        for container in containers.main:
            advance(container["name"], restart_policy)
    return Plan(tuple(actions), min(times, default=None))


def _advance(
    name: str, container: ContainerState, restart_policy: str, now: float, policy: BackOffPolicy
) -> tuple[Action | None, float | None]:
    """One container's next action, and when to look at it again."""
    state = container.state
    if container.starting or container.stopping or isinstance(state, Running):
        return None, None
    if isinstance(state, Waiting):
        if container.retry_at is not None and now < container.retry_at:
            return None, container.retry_at
        return StartContainer(name), None
    if not restarts(restart_policy, state):
        return None, None
    until = policy.ends_at(container.crash_back_off, state.finished_at)
    if now < until:
        return BackOffContainer(name, until, until - state.finished_at), until
    return StartContainer(name), None
