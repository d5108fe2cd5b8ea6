from collections.abc import Mapping
from typing import Any

import pytest

from plimsoll_operator import checks
from plimsoll_operator.desired import events
from plimsoll_operator.desired.events import build_events
from plimsoll_operator.desired.status import (
    Report,
    build_conditions,
    build_invalid_status,
    build_status,
    is_due,
    pruned,
)
from plimsoll_operator.tuning.values import (
    EngineReading,
    Failure,
    FailureClass,
    Limits,
    Source,
    Status,
    Unknown,
    UnknownReason,
    Verdict,
)
from support.resources import NOW, llmdeployment, observed, pod, statefulset, time

Json = dict[str, Any]
LIMITS = Limits(max_model_len=4096, gpu_memory_utilization=0.85)


def reading(name: str = "assistant-0", **values: Any) -> EngineReading:
    known: Json = {
        "kv_cache_usage": 0.314,
        "running": 3,
        "waiting": 1,
        "preemptions_total": 0.0,
        "max_model_len_admitted": 4096,
        "max_model_len_ceiling": 8192,
        "gpu_memory_utilization": 0.85,
    }
    return EngineReading(pod=name, at=NOW, **(known | values))


def status(
    *,
    previous: Json | None = None,
    engines: Mapping[str, EngineReading | Unknown] | None = None,
    failures: tuple[Failure, ...] = (),
    given_up: bool = False,
    ready: bool = True,
    now: float = NOW,
    recorded: Json | None = None,
    source: Source | None = Source.TUNED,
) -> Json:
    seen = observed(
        llmdeployment(engine={"maxModelLen": 8192}),
        pods=(pod(ready=ready),),
        statefulset=statefulset(),
        status=previous,
    )
    view = checks.View(observed=seen, failures=(), applied=True, stall=None, now=now)
    return build_status(
        Report(
            view=view,
            verdicts=checks.judge(view),
            failures=failures,
            engines={"assistant-0": reading()} if engines is None else engines,
            limits=LIMITS,
            source=source,
            recorded=recorded or {},
            given_up=given_up,
        )
    )


def test_a_settled_status() -> None:
    built = status()
    conditions = {c["type"]: c["status"] for c in built.pop("conditions")}

    assert conditions["Ready"] == "True"
    assert built == {
        "observedGeneration": 1,
        "url": "http://assistant.default.svc/v1",
        "selector": "app.kubernetes.io/instance=assistant,app.kubernetes.io/name=plimsoll-engine",
        "replicas": 1,
        "readyReplicas": 1,
        "updatedReplicas": 1,
        "readySummary": "1/1",
        "effective": {
            "maxModelLen": 4096,
            "maxModelLenCeiling": 8192,
            "gpuMemoryUtilization": 0.85,
            "maxNumSeqs": 256,
            "maxNumBatchedTokens": 2048,
            "source": "Tuned",
        },
        "revision": {"current": "new", "updated": "new", "lastKnownGood": "new"},
        "load": {"kvCacheUsagePercent": 31, "running": 3, "waiting": 1, "time": time(NOW)},
    }


def test_where_replicas_differ_the_strictest_counts_and_each_is_shown() -> None:
    engines = {
        "assistant-0": reading(),
        "assistant-1": reading("assistant-1", max_model_len_admitted=2048),
    }
    built = status(engines=engines)

    assert built["effective"]["maxModelLen"] == 2048
    assert [detail["maxModelLen"] for detail in built["replicasDetail"]] == [4096, 2048]


def test_unknown_is_not_zero() -> None:
    unknown = Unknown(UnknownReason.UNREACHABLE, "assistant-0", "connection refused")
    built = status(engines={"assistant-0": unknown})
    assert "load" not in built
    assert built["effective"]["maxModelLen"] == 4096, "what is wanted in force"


def test_the_last_known_good_revision_is_kept_while_a_newer_one_fails() -> None:
    previous = {"revision": {"lastKnownGood": "older", "blocked": ["oldest"]}}
    built = status(previous=previous, ready=False, given_up=True)
    assert built["revision"] == {
        "current": "new",
        "updated": "new",
        "lastKnownGood": "older",
        "blocked": ["oldest", "new"],
    }


# An engine killed by SIGKILL comes back, and its class stays in status.
def test_the_latest_failure_stays_after_its_pod_has_forgotten_it() -> None:
    killed = Failure(
        FailureClass.ENGINE_DEAD,
        "uid/1",
        "assistant-0",
        "the engine was killed by signal 9",
        at=NOW - 10,
        exit_code=137,
    )
    first = status(failures=(killed,))
    assert first["failures"]["last"] == {
        "time": time(NOW - 10),
        "pod": "assistant-0",
        "class": "EngineDead",
        "message": "the engine was killed by signal 9",
        "exitCode": 137,
    }
    assert status(previous=first)["failures"] == first["failures"]
    older = Failure(FailureClass.CGROUP_OOM, "uid/0", "assistant-0", "older", at=NOW - 99)
    assert status(previous=first, failures=(older,))["failures"] == first["failures"]


def test_transition_times_move_with_the_status_and_not_with_the_message() -> None:
    before = {
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": time(NOW - 99)}]
    }
    same, turned = (
        build_conditions(before, 7, (Verdict("Ready", value, "Reason", "message"),), NOW)[0]
        for value in (Status.TRUE, Status.FALSE)
    )
    assert same["lastTransitionTime"] == time(NOW - 99)
    assert turned["lastTransitionTime"] == time(NOW)
    assert same["observedGeneration"] == 7


def test_long_messages_are_cut() -> None:
    verdict = Verdict("Ready", Status.FALSE, "Refused", "x" * 5000)
    assert len(build_conditions({}, 1, (verdict,), NOW)[0]["message"]) == 1024


# Case B01.
def test_nothing_is_due_when_nothing_differs() -> None:
    first = status()
    assert not is_due(first, status(previous=first, now=NOW + 3600), NOW + 3600)


# Case B01: a changed metric causes at most one write per interval.
@pytest.mark.parametrize(("later", "due"), [(5, False), (29, False), (30, True)])
def test_figures_that_follow_the_traffic_wait_for_their_interval(later: float, due: bool) -> None:
    first = status()
    busier = status(
        previous=first, engines={"assistant-0": reading(kv_cache_usage=0.9)}, now=NOW + later
    )
    assert is_due(first, busier, NOW + later) is due


def test_a_metric_that_moves_less_than_is_shown_is_never_written() -> None:
    first = status()
    barely = status(
        previous=first, engines={"assistant-0": reading(kv_cache_usage=0.3101)}, now=NOW + 99
    )
    assert not is_due(first, barely, NOW + 99)


def test_what_happened_is_written_at_once() -> None:
    first = status()
    for changed in (
        status(previous=first, ready=False),
        status(previous=first, engines={"assistant-0": reading(max_model_len_admitted=2048)}),
        status(previous=first, recorded={"tuning": {"current": {"maxModelLen": 2048}}}),
        status(previous=first, recorded={"oom": {"total": 1}}),
    ):
        assert is_due(first, changed, NOW + 1)


def test_the_first_status_is_due() -> None:
    assert is_due({}, status(), NOW)


def test_pruning_drops_what_is_empty_and_keeps_zero_and_false() -> None:
    assert pruned({"a": None, "b": {}, "c": [], "d": {"e": None}, "f": 0, "g": False}) == {
        "f": 0,
        "g": False,
    }


def test_a_spec_that_cannot_be_read_says_so_and_keeps_the_rest() -> None:
    resource = llmdeployment(generation=4)
    resource["status"] = status()
    built = build_invalid_status(resource, "spec.drain is x; allowed: a duration", NOW)

    assert built["observedGeneration"] == 4
    assert built["effective"]["maxModelLen"] == 4096
    conditions = {c["type"]: (c["status"], c["reason"]) for c in built["conditions"]}
    assert conditions == {"Ready": ("False", "InvalidSpec"), "Stalled": ("True", "InvalidSpec")}


def test_one_event_per_turn_and_none_while_nothing_turns() -> None:
    def conditions(**states: tuple[str, str]) -> Json:
        return {
            "conditions": [
                {"type": name, "status": value, "reason": reason, "message": f"about {reason}"}
                for name, (value, reason) in states.items()
            ]
        }

    calm = conditions(Ready=("True", "Serving"), Degraded=("False", "AsExpected"))
    trouble = conditions(
        Ready=("False", "ModelTooLarge"),
        Progressing=("False", "ModelTooLarge"),
        Degraded=("True", "ModelTooLarge"),
        Stalled=("True", "ModelTooLarge"),
    )
    assert [(e.reason, e.warning) for e in build_events({}, calm)] == [("Serving", False)]
    assert build_events(calm, calm) == ()
    assert [(e.reason, e.warning) for e in build_events(calm, trouble)] == [("ModelTooLarge", True)]
    assert build_events(trouble, trouble) == ()
    other = conditions(Degraded=("True", "ImageError"))
    (event,) = build_events(trouble, other)
    assert event.reason == "ImageError"
    assert event.message == "Degraded True (ModelTooLarge) -> True: about ImageError"
    (event,) = build_events({}, calm)
    assert event.message == "Ready -> True: about Serving"


@pytest.mark.parametrize(
    ("condition", "before", "after", "warning"),
    [
        ("Ready", "True", "False", True),
        ("Ready", "False", "True", False),
        ("Ready", "True", "Unknown", True),
        ("Available", "True", "False", True),
        ("Available", "False", "True", False),
        ("Progressing", "True", "False", True),
        ("Progressing", "False", "True", False),
        ("Degraded", "True", "False", False),
        ("Stalled", "True", "False", False),
        ("MetricsAvailable", "False", "True", False),
        ("TuningActive", "True", "False", False),
        ("TuningLimited", "False", "True", False),
        ("OOMDetected", "True", "False", False),
        # The tuner's own Events tell of these.
        ("MetricsAvailable", "True", "False", None),
        ("OOMDetected", "False", "True", None),
    ],
)
def test_every_transition_is_one_event_with_from_and_to(
    condition: str, before: str, after: str, warning: bool | None
) -> None:
    def one(status: str, reason: str) -> Json:
        found = {"type": condition, "status": status, "reason": reason, "message": "so"}
        return {"conditions": [found]}

    found = build_events(one(before, "Was"), one(after, "Is"))
    if warning is None:
        assert found == ()
        return
    (event,) = found
    assert event.message == f"{condition} {before} (Was) -> {after}: so"
    assert (event.reason, event.warning) == ("Is", warning)
    assert build_events(one(after, "Is"), one(after, "Is")) == ()
    # What a new object begins with is no transition, unless it is a trouble or all is well.
    told = (condition, after) in {*events._TROUBLES, ("Ready", "True")}
    assert bool(build_events({}, one(after, "Is"))) is told


def test_one_death_by_memory_is_one_event_and_a_stall_for_it_another() -> None:
    def conditions(*kinds: str) -> Json:
        about = {"status": "True", "reason": "CgroupOOM", "message": "killed"}
        return {"conditions": [{"type": kind, **about} for kind in kinds]}

    assert build_events({}, conditions("Degraded")) == ()
    stalled = build_events(conditions("Degraded"), conditions("Degraded", "Stalled"))
    assert [event.reason for event in stalled] == ["CgroupOOM"]


# What is wanted is not said to be in force before an engine has it.
def test_the_source_stays_until_every_engine_has_taken_over_the_limits() -> None:
    tuned = status()
    assert tuned["effective"]["source"] == "Tuned"
    pending = status(previous=tuned, source=None)
    assert pending["effective"] == tuned["effective"]
    unknown = Unknown(UnknownReason.UNREACHABLE, "assistant-0", "connection refused")
    blind = status(previous=tuned, engines={"assistant-0": unknown}, source=Source.SPEC)
    assert blind["effective"] == tuned["effective"]
    assert status(previous=tuned, source=Source.SPEC)["effective"]["source"] == "Spec"
