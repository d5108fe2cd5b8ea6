"""The status a pod shows: phases, conditions and container states as tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll_local.agent.state import (
    ContainerState,
    Failure,
    Observed,
    Running,
    Terminated,
    Waiting,
)
from plimsoll_local.agent.status import build_patch, build_status, pod_phase
from support.pods import Json, build_container, build_pod

NOW = 1_000_000.0
CREATING = ContainerState(Waiting("ContainerCreating"))
RUNNING = ContainerState(Running(NOW - 10), started=True, ready=True)


def ended(exit_code: int, reason: str = "Error", message: str = "") -> Terminated:
    return Terminated(exit_code, reason, message, NOW - 20, NOW - 10, "plimsoll://a")


DONE = ContainerState(ended(0, "Completed"))
FAILED = ContainerState(ended(1))
CRASHING = ContainerState(Waiting("CrashLoopBackOff", "back-off 10s"), last=ended(1))


def observed(**containers: ContainerState) -> Observed:
    return Observed(containers=containers, started_at=NOW - 30, sandbox=True, pod_ip="10.244.0.2")


@pytest.mark.parametrize(
    ("policy", "states", "phase"),
    [
        ("Always", (CREATING,), "Pending"),
        ("Always", (RUNNING, CREATING), "Pending"),  # not all created yet
        ("Always", (RUNNING, RUNNING), "Running"),
        ("Always", (CRASHING,), "Running"),  # it has run before
        ("Always", (DONE,), "Running"),  # it will be started again
        ("OnFailure", (DONE, FAILED), "Running"),
        ("OnFailure", (DONE, DONE), "Succeeded"),
        ("Never", (DONE, DONE), "Succeeded"),
        ("Never", (DONE, FAILED), "Failed"),
        ("Never", (RUNNING, FAILED), "Running"),
    ],
)
def test_phases_of_a_pod(policy: str, states: tuple[ContainerState, ...], phase: str) -> None:
    names = [f"c{index}" for index in range(len(states))]
    pod = build_pod(containers=tuple(map(build_container, names)), restartPolicy=policy)
    assert pod_phase(pod, observed(**dict(zip(names, states, strict=True)))) == phase


def test_phases_while_initialising() -> None:
    init = [build_container("i")]
    pod = build_pod(initContainers=init)
    assert pod_phase(pod, observed(i=RUNNING, main=CREATING)) == "Pending"
    assert pod_phase(pod, observed(i=FAILED, main=CREATING)) == "Pending"
    assert pod_phase(pod, observed(i=DONE, main=RUNNING)) == "Running"
    never = build_pod(initContainers=init, restartPolicy="Never")
    assert pod_phase(never, observed(i=FAILED, main=CREATING)) == "Failed"


def test_a_deleted_pod_ends_by_its_exit_codes() -> None:
    pod = build_pod(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    assert pod_phase(pod, observed(main=RUNNING)) == "Running"
    assert pod_phase(pod, observed(main=DONE)) == "Succeeded"
    assert pod_phase(pod, observed(main=FAILED)) == "Failed"


def conditions(pod: Json, seen: Observed) -> dict[str, str]:
    status = build_status(pod, seen, "10.244.0.1", NOW)
    return {c["type"]: c["status"] for c in status["conditions"]}


@pytest.mark.parametrize(
    ("state", "sandbox", "expected"),
    [
        # sandbox, initialised, ready, containers ready, scheduled
        (CREATING, False, "False True False False True"),
        (CREATING, True, "True True False False True"),
        (replace(RUNNING, ready=False), True, "True True False False True"),
        (RUNNING, True, "True True True True True"),
        (CRASHING, True, "True True False False True"),
    ],
)
def test_conditions(state: ContainerState, sandbox: bool, expected: str) -> None:
    seen = replace(observed(main=state), sandbox=sandbox)
    found = conditions(build_pod(), seen)
    order = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    assert " ".join(found[kind] for kind in order) == expected


def test_a_readiness_gate_holds_the_pod_back() -> None:
    gates = [{"conditionType": "example.com/gate"}]
    pod = build_pod(readinessGates=gates)
    assert conditions(pod, observed(main=RUNNING))["Ready"] == "False"
    assert conditions(pod, observed(main=RUNNING))["ContainersReady"] == "True"
    open_gate = {"type": "example.com/gate", "status": "True"}
    passed = build_pod(readinessGates=gates, status={"conditions": [open_gate]})
    assert conditions(passed, observed(main=RUNNING))["Ready"] == "True"


def test_condition_times_move_only_with_their_status() -> None:
    pod = build_pod()
    first = build_status(pod, observed(main=CREATING), "10.244.0.1", NOW)
    again = build_status({**pod, "status": first}, observed(main=CREATING), "10.244.0.1", NOW + 50)
    assert again == first
    ready = build_status({**pod, "status": first}, observed(main=RUNNING), "10.244.0.1", NOW + 50)
    moved = {
        after["type"]
        for before, after in zip(first["conditions"], ready["conditions"], strict=True)
        if before["lastTransitionTime"] != after["lastTransitionTime"]
    }
    assert moved == {"Ready", "ContainersReady"}


def test_a_container_that_was_killed_for_memory_says_so() -> None:
    killed = replace(CRASHING, last=ended(137, "OOMKilled", "was too big"), restart_count=3)
    status = build_status(build_pod(), observed(main=killed), "10.244.0.1", NOW)
    (entry,) = status["containerStatuses"]
    assert entry["restartCount"] == 3
    assert entry["state"] == {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    assert entry["lastState"]["terminated"] == {
        "exitCode": 137,
        "reason": "OOMKilled",
        "message": "was too big",
        "startedAt": "1970-01-12T13:46:20Z",
        "finishedAt": "1970-01-12T13:46:30Z",
        "containerID": "plimsoll://a",
    }


def test_a_new_address_replaces_the_old_one() -> None:
    status = build_status(build_pod(), observed(main=RUNNING), "10.244.0.1", NOW)
    patch = build_patch(build_pod(), status)
    assert patch["metadata"] == {"uid": "uid-of-web-0"}
    assert patch["status"]["podIPs"] == [{"$patch": "replace"}, {"ip": "10.244.0.2"}]
    no_address = replace(observed(main=CREATING), pod_ip=None)
    status = build_status(build_pod(), no_address, "10.244.0.1", NOW)
    assert build_patch(build_pod(), status)["status"] == status


def test_a_failed_pod_carries_its_reason() -> None:
    seen = replace(observed(main=FAILED), failure=Failure("DeadlineExceeded", "too long"))
    status = build_status(build_pod(), seen, "10.244.0.1", NOW)
    assert (status["phase"], status["reason"]) == ("Failed", "DeadlineExceeded")
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "PodFailed")
