"""What the agent does next for a pod: scenarios as tables, the reason beside each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll_local.agent.back_off import BackOffPolicy
from plimsoll_local.agent.lifecycle import (
    Action,
    BackOffContainer,
    FailPod,
    PrepareSandbox,
    ReleaseSandbox,
    RemovePod,
    StartContainer,
    StopContainer,
    next_actions,
)
from plimsoll_local.agent.state import (
    BackOff,
    ContainerState,
    Failure,
    Observed,
    Running,
    Terminated,
    Waiting,
    observe_new,
)
from support.pods import Json, build_container, build_pod

NOW = 1000.0
POLICY = BackOffPolicy(base=10, cap=300, reset_after=600)
WAITING = ContainerState(Waiting("ContainerCreating"))
RUNNING = ContainerState(Running(900.0), started=True)


def ended(exit_code: int, at: float = NOW, back_off: BackOff | None = None) -> ContainerState:
    state = Terminated(exit_code, "Error", "", at - 5, at, "plimsoll://x")
    return ContainerState(state, crash_back_off=back_off)


def observed(**containers: ContainerState) -> Observed:
    return Observed(containers=containers, started_at=900.0, sandbox=True, pod_ip="10.244.0.2")


def actions(pod: Json, seen: Observed, now: float = NOW) -> tuple[Action, ...]:
    return next_actions(pod, seen, now, POLICY).actions


def deleted(grace: int = 30, **fields: Any) -> Json:
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace}
    return build_pod(metadata=metadata, **fields)


def test_a_new_pod_gets_its_sandbox_then_its_containers() -> None:
    pod = build_pod(containers=(build_container("a"), build_container("b")))
    fresh = replace(observed(a=WAITING, b=WAITING), sandbox=False)
    assert actions(pod, fresh) == (PrepareSandbox(),)
    assert actions(pod, replace(fresh, preparing=True)) == ()
    failed = next_actions(pod, replace(fresh, retry_at=NOW + 2), NOW, POLICY)
    assert (failed.actions, failed.wake_at) == ((), NOW + 2)
    assert actions(pod, replace(fresh, sandbox=True)) == (StartContainer("a"), StartContainer("b"))
    assert actions(pod, observed(a=replace(WAITING, starting=True), b=RUNNING)) == ()


@pytest.mark.parametrize(
    ("policy", "exit_code", "restarted"),
    [
        ("Always", 0, True),
        ("Always", 1, True),
        ("OnFailure", 0, False),
        ("OnFailure", 1, True),
        ("Never", 1, False),
    ],
)
def test_the_restart_policy_decides(policy: str, exit_code: int, restarted: bool) -> None:
    pod = build_pod(containers=(build_container("a"), build_container("b")), restartPolicy=policy)
    found = actions(pod, observed(a=ended(exit_code), b=RUNNING))
    assert found == ((StartContainer("a"),) if restarted else ())


def test_the_first_restart_is_at_once_and_the_next_wait_longer() -> None:
    pod = build_pod()
    assert actions(pod, observed(main=ended(1))) == (StartContainer("main"),)
    again = observed(main=ended(1, at=NOW, back_off=BackOff(20, NOW - 3)))
    plan = next_actions(pod, again, NOW + 5, POLICY)
    assert plan.actions == (BackOffContainer("main", until=NOW + 20, delay=20),)
    assert plan.wake_at == NOW + 20
    waiting = replace(
        again.containers["main"], state=Waiting("CrashLoopBackOff"), retry_at=NOW + 20
    )
    still = next_actions(pod, observed(main=waiting), NOW + 19, POLICY)
    assert (still.actions, still.wake_at) == ((), NOW + 20)
    assert actions(pod, observed(main=waiting), NOW + 20) == (StartContainer("main"),)


def test_delays_double_to_the_cap_and_are_forgotten_after_a_long_run() -> None:
    back_off: BackOff | None = None
    delays = []
    for _ in range(7):
        back_off = POLICY.next(back_off, NOW, NOW)
        delays.append(back_off.delay)
    assert delays == [10, 20, 40, 80, 160, 300, 300]
    assert POLICY.ends_at(back_off, NOW + 600) == NOW + 900
    assert POLICY.ends_at(back_off, NOW + 601) == NOW + 601  # it ran long enough
    assert POLICY.next(back_off, NOW + 601, NOW + 601).delay == 10


def test_init_containers_run_one_after_the_other() -> None:
    init = [build_container("i1"), build_container("i2")]
    pod = build_pod(initContainers=init)
    at_start = observed(i1=WAITING, i2=WAITING, main=WAITING)
    assert actions(pod, at_start) == (StartContainer("i1"),)
    assert actions(pod, at_start.with_container("i1", RUNNING)) == ()
    first_done = at_start.with_container("i1", ended(0))
    assert actions(pod, first_done) == (StartContainer("i2"),)
    both_done = first_done.with_container("i2", ended(0))
    assert actions(pod, both_done) == (StartContainer("main"),)
    failed = at_start.with_container("i1", ended(1))
    assert actions(pod, failed) == (StartContainer("i1"),)


def test_a_failed_init_container_ends_a_pod_that_never_restarts() -> None:
    pod = build_pod(initContainers=[build_container("i")], restartPolicy="Never")
    assert actions(pod, observed(i=ended(1), main=WAITING)) == (ReleaseSandbox(),)


def test_a_sidecar_must_have_started_and_is_stopped_last() -> None:
    sidecar = build_container("side", restartPolicy="Always")
    pod = build_pod(initContainers=[sidecar], restartPolicy="Never")
    assert actions(pod, observed(side=WAITING, main=WAITING)) == (StartContainer("side"),)
    starting = replace(RUNNING, started=False)
    assert actions(pod, observed(side=starting, main=WAITING)) == ()
    assert actions(pod, observed(side=RUNNING, main=WAITING)) == (StartContainer("main"),)
    assert actions(pod, observed(side=RUNNING, main=ended(0))) == (StopContainer("side", 30, ""),)
    assert actions(pod, observed(side=ended(0), main=ended(0))) == (ReleaseSandbox(),)
    going = deleted(initContainers=[sidecar])
    assert actions(going, observed(side=RUNNING, main=RUNNING)) == (StopContainer("main", 30, ""),)


def test_a_deleted_pod_is_stopped_and_then_removed() -> None:
    seen = observed(main=RUNNING)
    assert actions(deleted(7), seen) == (StopContainer("main", 7, ""),)
    # A start under way is waited for, then ended.
    assert actions(deleted(), observed(main=replace(WAITING, starting=True))) == ()
    assert actions(deleted(), observed(main=ended(143))) == (RemovePod(),)
    never_run = replace(observed(main=WAITING), sandbox=False)
    assert actions(deleted(), never_run) == (RemovePod(),)


def test_a_finished_pod_gives_its_sandbox_back_and_rests() -> None:
    pod = build_pod(restartPolicy="Never")
    assert actions(pod, observed(main=ended(0))) == (ReleaseSandbox(),)
    assert actions(pod, replace(observed(main=ended(0)), sandbox=False)) == ()


def test_a_pod_past_its_deadline_fails_and_is_stopped() -> None:
    pod = build_pod(activeDeadlineSeconds=60)
    seen = observed(main=RUNNING)
    assert next_actions(pod, seen, 950.0, POLICY).wake_at == 960.0
    (action,) = actions(pod, seen, 960.0)
    assert isinstance(action, FailPod)
    assert action.failure.reason == "DeadlineExceeded"
    failed = replace(seen, failure=action.failure)
    assert actions(pod, failed, 961.0) == (StopContainer("main", 30, ""),)


def status(state: Json, restarts: int = 2, phase: str = "Running") -> Json:
    entry = {"name": "main", "state": state, "restartCount": restarts, "containerID": "x"}
    return {
        "phase": phase,
        "startTime": "1970-01-01T00:15:00Z",
        "containerStatuses": [entry],
    }


def test_what_ran_under_an_earlier_agent_has_ended_and_is_started_again() -> None:
    pod = build_pod(status=status({"running": {"startedAt": "1970-01-01T00:16:00Z"}}))
    seen = observe_new(pod, NOW)
    state = seen.containers["main"].state
    assert isinstance(state, Terminated)
    assert (state.exit_code, state.reason, state.started_at) == (255, "Unknown", 960.0)
    assert (seen.containers["main"].restart_count, seen.started_at) == (2, 900.0)
    assert actions(pod, replace(seen, sandbox=True)) == (StartContainer("main"),)


def test_a_new_agent_initialises_a_pod_anew_but_leaves_a_finished_one() -> None:
    done = {"terminated": {"exitCode": 0, "finishedAt": "1970-01-01T00:16:00Z"}}
    document = status({"running": {}})
    document["initContainerStatuses"] = [{"name": "i", "state": done}]
    pod = build_pod(initContainers=[build_container("i")], status=document)
    seen = replace(observe_new(pod, NOW), sandbox=True)
    assert actions(pod, seen) == (StartContainer("i"),)
    finished = build_pod(restartPolicy="Never", status=status(done, phase="Succeeded"))
    assert actions(finished, observe_new(finished, NOW)) == ()
    failed = status({"running": {}}, phase="Failed") | {"reason": "DeadlineExceeded"}
    pod = build_pod(status=failed)
    assert observe_new(pod, NOW).failure == Failure("DeadlineExceeded", "")
