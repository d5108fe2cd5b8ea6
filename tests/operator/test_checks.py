from collections.abc import Iterable
from typing import Any

import pytest

from plimsoll_operator import checks
from plimsoll_operator.checks import View, Violation
from plimsoll_operator.desired.status import build_conditions
from plimsoll_operator.observed import Pod, StatefulSet
from plimsoll_operator.tuning.failures import classify
from plimsoll_operator.tuning.values import Failure, FailureClass, Status
from support.resources import NOW, llmdeployment, observed, pod, statefulset

NO_IMAGE = {
    "reason": "ImagePullBackOff",
    "message": 'Back-off pulling image "registry.example/engine:does-not-exist"',
}
STALL = Violation("InvalidConfiguration", "maxModelLen is 8192; the model allows 2048")


def view(
    *pods: Pod,
    found: StatefulSet | None = None,
    wanted: int = 1,
    applied: bool = True,
    stall: Violation | None = None,
    changed_at: float = NOW - 60,
    deadline: str = "5m",
    missing_since: float | None = None,
) -> View:
    resource = llmdeployment(replicas=wanted, rollout={"progressDeadline": deadline})
    seen = observed(
        resource,
        pods=pods,
        statefulset=found or statefulset(replicas=wanted),
        changed_at=changed_at,
    )
    failures: Iterable[Failure | None] = (classify(pod) for pod in pods)
    return View(
        observed=seen,
        failures=checks.current_failures(pods, [f for f in failures if f is not None]),
        applied=applied,
        stall=stall,
        now=NOW,
        missing_since=missing_since,
    )


def judged(view: View) -> dict[str, tuple[str, str, str]]:
    return {v.type: (v.status.value, v.reason, v.message) for v in checks.judge(view)}


def old(ordinal: int, **state: Any) -> Pod:
    return pod(f"assistant-{ordinal}", revision="old", **state)


def new(ordinal: int, **state: Any) -> Pod:
    return pod(f"assistant-{ordinal}", revision="new", **state)


ROLLING = statefulset(replicas=2, current="old", update="new")


@pytest.mark.parametrize(
    ("seen", "ready", "available", "progressing", "degraded"),
    [
        # settled
        (view(new(0)), "True Serving", "True ReplicasServe", "True Complete", "False AsExpected"),
        # just created: no pod yet
        (
            view(),
            "False ReplicasNotReady",
            "False NoReplicaServes",
            "True RollingOut",
            "False AsExpected",
        ),
        # B03: the template was changed but is not in the cluster yet; the old pods still serve
        (
            view(old(0), old(1), found=statefulset(replicas=2, current="old", update="old"),
                 wanted=2, applied=False),
            "False RollingOut", "True ReplicasServe", "True RollingOut", "False AsExpected",
        ),
        # B03: applied, but the controller has not looked yet: its revisions are the old ones
        (
            view(old(0), old(1), wanted=2, found=statefulset(
                replicas=2, current="old", update="old", generation=2, observed_generation=1)),
            "False RollingOut", "True ReplicasServe", "True RollingOut", "False AsExpected",
        ),
        # B03: a new pod cannot be pulled, an old one serves
        (
            view(old(0), new(1, ready=False, waiting=NO_IMAGE), found=ROLLING, wanted=2),
            "False ImageError", "True ReplicasServe", "True RollingOut", "True ImageError",
        ),
        # B03: and does not get any further
        (
            view(old(0), new(1, ready=False, waiting=NO_IMAGE), found=ROLLING, wanted=2,
                 deadline="2m", changed_at=NOW - 700),
            "False ImageError", "True ReplicasServe",
            "False ProgressDeadlineExceeded", "True ImageError",
        ),
        # both new pods serve but an old one has not gone yet
        (
            view(new(0), new(1), old(2, deleting=True), found=ROLLING, wanted=2),
            "False RollingOut", "True ReplicasServe", "True RollingOut", "False AsExpected",
        ),
        # scaled up: the second pod is starting
        (
            view(new(0), new(1, ready=False), wanted=2),
            "False ReplicasNotReady", "True ReplicasServe", "True RollingOut", "False AsExpected",
        ),
        # scaled to nothing
        (
            view(wanted=0),
            "False ScaledToZero", "False ScaledToZero", "True Complete", "False AsExpected",
        ),
        # only the user can help
        (
            view(stall=STALL),
            "False InvalidConfiguration", "False NoReplicaServes",
            "False InvalidConfiguration", "True InvalidConfiguration",
        ),
    ],
)  # fmt: skip
def test_conditions(
    seen: View, ready: str, available: str, progressing: str, degraded: str
) -> None:
    found = {name: f"{status} {reason}" for name, (status, reason, _) in judged(seen).items()}

    assert found["Ready"] == ready
    assert found["Available"] == available
    assert found["Progressing"] == progressing
    assert found["Degraded"] == degraded


def test_a_stuck_rollout_names_the_pod_and_its_image_error() -> None:
    seen = view(
        old(0),
        new(1, ready=False, waiting=NO_IMAGE, created=NOW - 600),
        found=ROLLING,
        wanted=2,
        changed_at=NOW - 700,
    )

    message = judged(seen)["Progressing"][2]

    assert "assistant-1" in message
    assert "does-not-exist" in message


def test_available_counts_the_pods_of_the_older_revision() -> None:
    seen = view(old(0), new(1), found=ROLLING, wanted=2)
    assert judged(seen)["Available"][2] == "2 of 2 replicas serve, 1 of them an older revision"


@pytest.mark.parametrize(
    ("changed_at", "created", "ready_since", "exceeded"),
    [
        # a deadline of 300 s, counted from the latest of the three
        (NOW - 301, NOW - 301, None, True),
        (NOW - 299, NOW - 900, None, False),
        (NOW - 900, NOW - 299, None, False),
        (NOW - 900, NOW - 900, NOW - 299, False),
        (NOW - 900, NOW - 900, NOW - 301, True),
    ],
)
def test_the_deadline_counts_from_the_last_step_forward(
    changed_at: float, created: float, ready_since: float | None, exceeded: bool
) -> None:
    waiting = new(1, ready=False, created=created)
    other = new(0, created=created, ready=ready_since is not None, ready_since=ready_since or 0.0)
    seen = view(other, waiting, wanted=2, changed_at=changed_at)

    status, reason, _ = judged(seen)["Progressing"]

    assert (status, reason == "ProgressDeadlineExceeded") == (
        ("False", True) if exceeded else ("True", False)
    )


def test_the_root_cause_comes_before_its_symptoms() -> None:
    pods = (new(0, ready=False), new(1, ready=False), new(2, ready=False))
    failures = [
        Failure(FailureClass.UNSCHEDULABLE, "a", "assistant-0", "no node"),
        Failure(FailureClass.ENGINE_DEAD, "b", "assistant-1", "signal 9"),
        Failure(FailureClass.CGROUP_OOM, "c", "assistant-2", "killed at 8Gi"),
    ]

    ordered = checks.current_failures(pods, failures)

    assert [failure.failure_class for failure in ordered] == [
        FailureClass.CGROUP_OOM,
        FailureClass.ENGINE_DEAD,
        FailureClass.UNSCHEDULABLE,
    ]


def test_a_recovered_pod_is_no_trouble() -> None:
    dead = {"exitCode": 137, "reason": "Error", "finishedAt": "2027-01-15T08:00:00Z"}
    recovered = new(0, last_terminated=dead, restarts=1)
    assert view(recovered).failures == ()
    assert judged(view(recovered))["Ready"][0] == Status.TRUE.value


@pytest.mark.parametrize(
    ("pods", "before", "since"),
    [
        ((new(0), new(1)), NOW - 99, None),
        # a pod is replaced: away for a moment
        ((new(0),), None, NOW),
        ((new(0),), NOW - 10, NOW - 10),
        ((), NOW - 99, NOW - 99),
        # one that goes is there until it is gone
        ((new(0), new(1, deleting=True)), NOW - 99, None),
    ],
)
def test_since_when_pods_are_missing(
    pods: tuple[Pod, ...], before: float | None, since: float | None
) -> None:
    seen = observed(llmdeployment(replicas=2), pods=pods, statefulset=statefulset(replicas=2))
    assert checks.missing_since(seen, before, NOW) == since


def test_a_restarted_operator_goes_on_saying_that_no_pod_is_made() -> None:
    told = view(missing_since=NOW - checks.MISSING_SECONDS)
    conditions = build_conditions({}, 1, checks.judge(told), NOW)
    seen = observed(statefulset=statefulset(), status={"conditions": conditions})

    again = view(missing_since=checks.missing_since(seen, None, NOW))

    assert judged(again) == judged(told)


@pytest.mark.parametrize(
    ("seen", "ready", "degraded"),
    [
        (view(missing_since=NOW - 29), "ReplicasNotReady", "AsExpected"),
        (view(missing_since=NOW - 30), "PodsNotCreated", "PodsNotCreated"),
        # some are made and the next is refused, as by a quota
        (view(new(0), wanted=2, missing_since=NOW - 30), "PodsNotCreated", "PodsNotCreated"),
        (
            view(new(0), found=statefulset(replicas=2), wanted=2, missing_since=NOW - 5),
            "ReplicasNotReady", "AsExpected",
        ),
        # what a pod says is nearer to the cause
        (
            view(new(0, ready=False, waiting=NO_IMAGE), wanted=2, missing_since=NOW - 30),
            "ImageError", "ImageError",
        ),
        (view(stall=STALL, missing_since=NOW - 30), STALL.reason, STALL.reason),
    ],
)  # fmt: skip
def test_a_controller_that_makes_no_pods_is_named_soon(
    seen: View, ready: str, degraded: str
) -> None:
    found = judged(seen)
    assert found["Ready"][1] == ready
    assert found["Degraded"][1] == degraded
    if ready == "PodsNotCreated":
        made = len(seen.observed.pods)
        for condition in ("Ready", "Degraded"):
            assert f"makes no more than {made} of {seen.wanted} pods" in found[condition][2]
            assert "kubectl describe sts assistant -n default" in found[condition][2]


def test_an_object_of_somebody_else_is_never_taken_over() -> None:
    def child(metadata: dict[str, Any]) -> Violation | None:
        seen = observed()
        children = {("Service", "assistant"): {"metadata": metadata}}
        return checks.foreign_children(type(seen)(**{**vars(seen), "children": children}))

    ours = {
        "kind": "LLMDeployment",
        "name": "assistant",
        "uid": "uid-assistant",
        "controller": True,
    }
    assert child({"ownerReferences": [ours]}) is None
    assert child({"labels": {"plimsoll.dev/deployment": "assistant"}}) is None, "orphaned: adopted"
    theirs = child({"ownerReferences": [{**ours, "uid": "other"}]})
    assert theirs is not None
    assert theirs.reason == "NameConflict"
    assert "belongs to LLMDeployment assistant (uid other)" in theirs.message
    assert "until it is deleted or the LLMDeployment has another name" in theirs.message
    stripped = child({"labels": {}})
    assert stripped is not None
    way_out = "kubectl label service assistant plimsoll.dev/deployment=assistant --overwrite"
    assert way_out in stripped.message


@pytest.mark.parametrize(
    ("pods", "failure", "applied", "concerned"),
    [
        ((new(0),), Failure(FailureClass.MODEL_TOO_LARGE, "i", "assistant-0", ""), True, True),
        ((old(0),), Failure(FailureClass.MODEL_TOO_LARGE, "i", "assistant-0", ""), True, False),
        ((new(0),), Failure(FailureClass.MODEL_TOO_LARGE, "i", "assistant-0", ""), False, False),
        # running out of memory while serving teaches something whatever the template
        (
            (old(0),),
            Failure(FailureClass.CUDA_OOM_AT_RUNTIME, "i", "assistant-0", "", serving=True),
            True,
            True,
        ),
    ],
)
def test_failed_starts_of_an_older_template_say_nothing_of_the_new_one(
    pods: tuple[Pod, ...], failure: Failure, applied: bool, concerned: bool
) -> None:
    seen = observed(pods=pods, statefulset=statefulset())
    assert checks.concerns(failure, seen, applied=applied) is concerned
