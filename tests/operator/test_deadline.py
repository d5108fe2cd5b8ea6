"""Which rollouts have had their time, and what they are blamed for."""

from typing import Any

import pytest

from plimsoll_operator.checks import Violation
from plimsoll_operator.observed import Pod
from plimsoll_operator.plan.canary import Canary
from plimsoll_operator.plan.deadline import find_overdue
from plimsoll_operator.tuning.values import Failure, FailureClass
from support.resources import NOW, llmdeployment, observed, pod, statefulset, time

# Since the operator wrote the template, with a deadline of 600 s and a soak of 60.
BEGAN = NOW - 661
LATE = "; no replica of the template worked within 600 s"
OLD = pod("assistant-0", revision="old")


def new(ordinal: int = 1, **state: Any) -> Pod:
    return pod(
        f"assistant-{ordinal}", revision="new", **{"ready": False, "created": BEGAN, **state}
    )


def failed(kind: FailureClass, name: str = "assistant-1") -> Failure:
    return Failure(kind, "incident", name, "its words", at=NOW - 5)


def judge(
    *pods: Pod,
    failures: tuple[Failure, ...] = (),
    began: float = BEGAN,
    missing_since: float | None = None,
    probe_tokens: int | None = None,
    status: dict[str, Any] | None = None,
    **spec: Any,
) -> Violation | None:
    rollout = {"progressDeadline": "600s", "soak": "60s"}
    found = statefulset(replicas=2, current="old", update="new", applied_at=began)
    seen = observed(
        llmdeployment(replicas=2, rollout=rollout, **spec),
        statefulset=found,
        pods=pods,
        status=status,
    )
    canaries = [each for each in pods if each.revision == "new"]
    canary = Canary(canaries[-1], False, "it waits", probe_tokens) if canaries else None
    return find_overdue(seen, canary, failures=failures, missing_since=missing_since, now=NOW)


@pytest.mark.parametrize(
    ("found", "arguments", "blamed"),
    [
        ((OLD, new()), {}, Violation("ProgressDeadlineExceeded", f"it waits{LATE}")),
        # a single replica has the template before it to go back to
        ((new(0),), {}, Violation("ProgressDeadlineExceeded", f"it waits{LATE}")),
        # the cause before the symptom
        (
            (OLD, new()), {"failures": (failed(FailureClass.IMAGE_ERROR),)},
            Violation("ImageError", f"pod assistant-1: its words{LATE}"),
        ),
        # another pod's is none
        (
            (OLD, new()), {"failures": (failed(FailureClass.IMAGE_ERROR, "assistant-0"),)},
            Violation("ProgressDeadlineExceeded", f"it waits{LATE}"),
        ),
        # a node selector that no node has
        (
            (OLD, new()), {"failures": (failed(FailureClass.UNSCHEDULABLE),)},
            Violation("Unschedulable", f"pod assistant-1: its words{LATE}"),
        ),
        # one more than wanted: nothing was given up for it, it may wait
        (
            (OLD, pod("assistant-1", revision="old"), new(2)),
            {"failures": (failed(FailureClass.UNSCHEDULABLE, "assistant-2"),)},
            None,
        ),
        # what no template can mend
        ((OLD, new()), {"failures": (failed(FailureClass.GPU_BUSY_AT_START),)}, None),
        ((OLD, new()), {"failures": (failed(FailureClass.GPU_FAULT),)}, None),
        ((OLD, new()), {"failures": (failed(FailureClass.EVICTED),)}, None),
        # it serves and is asked
        ((OLD, new(ready=True, ready_since=BEGAN)), {"probe_tokens": 2044}, None),
        # it cannot be read, while others can
        (
            (OLD, new(ready=True, ready_since=BEGAN)), {},
            Violation("ProgressDeadlineExceeded", f"it waits{LATE}"),
        ),
        # each step forward begins the time anew
        ((OLD, new()), {"began": NOW - 660}, None),
        ((OLD, new(created=NOW - 600)), {}, None),
        ((OLD, new(ready=True, ready_since=NOW - 60)), {}, None),
        # an old pod that drains has its own time
        ((pod("assistant-0", revision="old", deleting=True), new()), {}, None),
        # its pod may only be away for a moment
        ((OLD,), {}, None),
        ((OLD,), {"missing_since": NOW - 660}, None),
        (
            (OLD,), {"missing_since": BEGAN},
            Violation("ProgressDeadlineExceeded", f"no pod of it can be made{LATE}"),
        ),
    ],
)  # fmt: skip
def test_a_template_that_works_nowhere_has_its_time(
    found: tuple[Pod, ...], arguments: dict[str, Any], blamed: Violation | None
) -> None:
    assert judge(*found, **arguments) == blamed


@pytest.mark.parametrize(
    ("kind", "died", "reason"),
    [
        ("EngineDead", NOW - 40, "EngineDead"),
        ("GPUBusyAtStart", NOW - 40, None),
        # of before this rollout
        ("EngineDead", BEGAN - 40, "ProgressDeadlineExceeded"),
    ],
)
def test_a_group_that_is_made_anew_by_each_death_gets_no_more_time(
    kind: str, died: float, reason: str | None
) -> None:
    last = {"time": time(died), "pod": "assistant-1", "class": kind, "message": "its words"}
    found = judge(
        OLD,
        new(created=NOW - 10),
        parallelism={"tensor": 2, "nodes": 2},
        status={"failures": {"last": last}},
    )
    assert (None if found is None else found.reason) == reason
