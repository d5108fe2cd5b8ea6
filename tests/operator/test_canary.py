"""What one look at the first pod of a new template says of it."""

from collections.abc import Mapping
from typing import Any

import pytest

from plimsoll_operator.observed import Pod
from plimsoll_operator.plan.canary import Canary, Probe, ProbeOutcome, judge_canary
from plimsoll_operator.tuning.values import (
    EngineReading,
    Failure,
    FailureClass,
    Unknown,
    UnknownReason,
)
from support.resources import NOW, llmdeployment, observed, pod, statefulset, time

SOAK = 120.0


def canary_pod(**state: Any) -> Pod:
    return pod("assistant-1", revision="new", **{"ready_since": NOW - 30, **state})


def reading(name: str = "assistant-1", **fields: Any) -> EngineReading:
    known = {"max_model_len_admitted": 4096, "largest_prompt_admissible": 3000, **fields}
    return EngineReading(pod=name, at=NOW, kv_cache_usage=0.1, waiting=0, **known)


def probe(outcome: ProbeOutcome, failures: int = 0, uid: str = "uid-assistant-1-new") -> Probe:
    return Probe(uid, outcome, 2996, f"it was {outcome}", NOW - 20, failures)


def death(kind: FailureClass, name: str = "assistant-1", serving: bool | None = None) -> Failure:
    return Failure(kind, "incident", name, "its words", at=NOW - 5, serving=serving)


def unknown(name: str) -> Unknown:
    return Unknown(UnknownReason.UNREACHABLE, name, "no route")


def judge(
    found: Pod | None,
    *failures: Failure,
    asked: Probe | None = None,
    readings: Mapping[str, EngineReading | Unknown] | None = None,
    mode: str = "Probe",
    now: float = NOW,
) -> Canary | None:
    seen = observed(
        llmdeployment(replicas=2, rollout={"canary": mode, "soak": f"{SOAK:g}s"}),
        statefulset=statefulset(replicas=2, current="old", update="new"),
        pods=(pod("assistant-0", revision="old"), *([] if found is None else [found])),
    )
    return judge_canary(
        seen,
        failures=failures,
        readings={"assistant-1": reading()} if readings is None else readings,
        probe=asked,
        now=now,
    )


def test_there_is_none_before_its_pod() -> None:
    assert judge(None) is None
    assert judge(canary_pod(deleting=True)) is None


@pytest.mark.parametrize(
    ("asked", "tokens", "message"),
    [
        # the longest that is admitted and fits the cache, with room for the answer
        (None, 2996, "gets a prompt of 2996 tokens"),
        # no room now is no answer
        (probe(ProbeOutcome.BUSY), 2996, "again, after: it was Busy"),
        # one failure may have a cause of its own
        (probe(ProbeOutcome.FAILED, failures=1), 2996, "again, after: it was Failed"),
        # what another pod answered says nothing of this one
        (probe(ProbeOutcome.PASSED, uid="uid-of-before"), 2996, "gets a prompt"),
        (probe(ProbeOutcome.PASSED), None, "must stay ready for 120 s; it was Passed"),
        # a server that takes no such request is not to blame for it
        (probe(ProbeOutcome.REFUSED), None, "must stay ready for 120 s; it was Refused"),
    ],
)
def test_a_ready_canary_is_asked_and_then_soaks(
    asked: Probe | None, tokens: int | None, message: str
) -> None:
    found = judge(canary_pod(), asked=asked)
    assert found is not None
    assert (found.proven, found.probe_tokens, found.failure) == (False, tokens, None)
    assert message in found.message


@pytest.mark.parametrize(
    ("mode", "asked", "later", "proven"),
    [
        ("Probe", probe(ProbeOutcome.PASSED), SOAK - 31, False),
        ("Probe", probe(ProbeOutcome.PASSED), SOAK - 30, True),
        ("Probe", None, SOAK, False),
        ("Soak", None, SOAK - 31, False),
        ("Soak", None, SOAK - 30, True),
    ],
)
def test_it_is_proven_by_answer_and_time(
    mode: str, asked: Probe | None, later: float, proven: bool
) -> None:
    found = judge(canary_pod(), asked=asked, mode=mode, now=NOW + later)
    assert found is not None
    assert found.proven is proven


def test_it_starts_before_it_is_asked() -> None:
    found = judge(canary_pod(ready=False))
    assert found is not None
    assert (found.proven, found.probe_tokens) == (False, None)
    assert found.message == "pod assistant-1 is not ready yet"


def test_unknown_is_not_passed_where_others_can_be_read() -> None:
    readings: Mapping[str, EngineReading | Unknown] = {
        "assistant-0": reading("assistant-0"),
        "assistant-1": unknown("assistant-1"),
    }
    found = judge(canary_pod(), readings=readings, now=NOW + SOAK)
    assert found is not None
    assert (found.proven, found.failure) == (False, None)
    # Where no engine is reachable, no prompt can be sent, and the soak decides alone.
    nothing = {name: unknown(name) for name in readings}
    found = judge(canary_pod(), readings=nothing, now=NOW + SOAK)
    assert found is not None
    assert found.proven
    assert "no prompt was sent" in found.message


@pytest.mark.parametrize(
    ("found", "dead", "fails"),
    [
        # once is enough for memory while it served
        (canary_pod(restarts=1), death(FailureClass.CGROUP_OOM, serving=True), True),
        (canary_pod(restarts=1), death(FailureClass.CUDA_OOM_AT_RUNTIME, serving=True), True),
        # failed starts are the tuner's, which has means against them
        (canary_pod(restarts=2), death(FailureClass.CUDA_OOM_AT_START, serving=False), False),
        # one death may be anybody's
        (canary_pod(restarts=1), death(FailureClass.ENGINE_DEAD, serving=True), False),
        (canary_pod(restarts=2), death(FailureClass.ENGINE_DEAD, serving=True), True),
        # no fault of the template
        (canary_pod(restarts=3), death(FailureClass.GPU_FAULT, serving=True), False),
        (canary_pod(restarts=3), death(FailureClass.GPU_BUSY_AT_START), False),
        (canary_pod(), death(FailureClass.CGROUP_OOM, "assistant-0", serving=True), False),
    ],
)
def test_which_deaths_speak_against_the_template(found: Pod, dead: Failure, fails: bool) -> None:
    seen = judge(found, dead, asked=probe(ProbeOutcome.PASSED))
    assert seen is not None
    assert (seen.failure is not None) is fails
    if seen.failure is not None:
        assert seen.failure.reason == dead.failure_class
        assert "pod assistant-1: its words" in seen.failure.message


@pytest.mark.parametrize(
    ("kind", "name", "before", "fails"),
    [
        # its pods are made anew by each death, and status has the one before
        ("EngineDead", "assistant-1", NOW - 60, True),
        ("CollectiveFailure", "assistant-1", NOW - 60, True),
        # the same death, of which another of its pods had told first
        ("EngineDead", "assistant-1", NOW - 20, False),
        # of another template, another group, another kind
        ("EngineDead", "assistant-1", NOW - 4000, False),
        ("EngineDead", "assistant-0", NOW - 60, False),
        ("GPUBusyAtStart", "assistant-1", NOW - 60, False),
    ],
)
@pytest.mark.parametrize("deleting", [False, True])
def test_the_second_death_of_a_group_is_against_it(
    kind: str, name: str, before: float, fails: bool, deleting: bool
) -> None:
    last = {"time": time(before), "pod": name, "class": kind, "message": "its words"}
    group = canary_pod(ready=False, created=NOW - 30, deleting=deleting)
    seen = observed(
        llmdeployment(replicas=2, parallelism={"tensor": 2, "nodes": 2}),
        statefulset=statefulset(replicas=2, current="old", update="new", applied_at=NOW - 600),
        pods=(pod("assistant-0", revision="old"), group),
        status={"failures": {"last": last}},
    )
    found = judge_canary(
        seen, failures=[death(FailureClass.ENGINE_DEAD)], readings={}, probe=None, now=NOW
    )
    assert (found is not None and found.failure is not None) is fails


def test_a_prompt_that_fails_twice_is_against_it() -> None:
    found = judge(canary_pod(), asked=probe(ProbeOutcome.FAILED, failures=2))
    assert found is not None
    assert found.failure is not None
    assert found.failure.reason == "CanaryProbeFailed"
