"""A node with a faulty GPU: when it is avoided, what that makes of the StatefulSet, who is made anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll_operator import names
from plimsoll_operator.avoidance import (
    AVOIDED_SECONDS,
    MOST_AVOIDED,
    Placement,
    as_one,
    avoidance_events,
    find_avoided,
    place,
    placed,
    stranded,
)
from plimsoll_operator.desired.pod import build_pod_template
from plimsoll_operator.desired.statefulset import build_statefulset
from plimsoll_operator.plan import Step, StepReason, next_step
from plimsoll_operator.tuning.values import Failure, FailureClass
from support.resources import NOW, deployment, llmdeployment, observed, pod, statefulset, time

Json = dict[str, Any]
FAULT = Failure(FailureClass.GPU_FAULT, "uid/1", "assistant-0", "Xid 79", at=NOW)
SETTLED = Step(replicas=2, partition=0, reason=StepReason.SETTLED)
ENTRY = {"node": "node-1", "pod": "assistant-0", "time": time(NOW), "message": "Xid 79"}


def entry(node: str, at: float = NOW) -> Json:
    return {**ENTRY, "node": node, "time": time(at)}


@pytest.mark.parametrize(
    ("failure", "before", "trusted", "avoided"),
    [
        (FAULT, [], "", [ENTRY]),
        # Nothing else is a node's fault.
        (replace(FAULT, failure_class=FailureClass.GPU_BUSY_AT_START), [], "", []),
        (replace(FAULT, failure_class=FailureClass.ENGINE_DEAD), [], "", []),
        (replace(FAULT, at=None), [], "", []),
        (replace(FAULT, pod="somebody-0"), [], "", []),
        # A day after the last fault there.
        (replace(FAULT, at=NOW - AVOIDED_SECONDS), [], "", []),
        (None, [entry("node-7", NOW - AVOIDED_SECONDS)], "", []),
        (None, [entry("node-7", NOW - AVOIDED_SECONDS + 1)], "", [entry("node-7", NOW - AVOIDED_SECONDS + 1)]),
        (FAULT, [entry("node-1", NOW - 99)], "", [ENTRY]),
        # Until a user says otherwise.
        (FAULT, [entry("node-7")], "node-1", [entry("node-7")]),
        (FAULT, [entry("node-7")], "node-7, node-1", []),
        (FAULT, [entry("node-7")], "*", []),
        # What follows the pods everywhere is no node's fault.
        (FAULT, [entry("a"), entry("b"), entry("c")], "", [entry("a"), entry("b"), entry("c")]),
    ],
)  # fmt: skip
def test_which_nodes_are_avoided(
    failure: Failure | None, before: list[Json], trusted: str, avoided: list[Json]
) -> None:
    resource = llmdeployment()
    resource["metadata"]["annotations"] = {names.TRUSTED_NODES: trusted}
    seen = observed(resource, pods=(pod(ready=False),), status={"avoidedNodes": before})
    found = find_avoided(seen, [failure] if failure else [], NOW)
    assert found == avoided
    assert len(found) <= MOST_AVOIDED


@pytest.mark.parametrize(
    ("live", "step", "applied", "placement"),
    [
        # A new template has no revision before it that would be the same.
        ({}, SETTLED, False, Placement(("node-1",))),
        ({"avoided": ("node-1",), "alike": ("b",)}, SETTLED, False, Placement(("node-1",))),
        ({}, SETTLED, True, Placement(("node-1",), ("new",))),
        ({"avoided": ("node-1",), "alike": ("b",)}, SETTLED, True, Placement(("node-1",), ("b",))),
        ({"avoided": ("x",), "alike": ("b",)}, SETTLED, True, Placement(("node-1",), ("b", "new"))),
        # Not in the middle of something else.
        ({}, replace(SETTLED, reason=StepReason.CANARY), True, Placement()),
        ({}, replace(SETTLED, reason=StepReason.ROLLED_BACK), True, Placement()),
        ({"observed_generation": 0}, SETTLED, True, Placement()),
    ],
)
def test_what_the_statefulset_carries(
    live: Json, step: Step, applied: bool, placement: Placement
) -> None:
    seen = observed(statefulset=replace(statefulset(), **live))
    assert place(seen, step, [ENTRY], applied=applied) == placement


def test_without_a_fault_nothing_differs() -> None:
    built = build_statefulset(deployment(), SETTLED, build_pod_template(deployment(), "image"))
    assert placed(built, Placement()) is built


def test_a_users_affinity_stays_beside_ours() -> None:
    theirs = {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
    field = "preferredDuringSchedulingIgnoredDuringExecution"
    patch = {"affinity": {"nodeAffinity": {field: [theirs]}, "podAffinity": {}}}
    of = deployment(podTemplate={"patch": patch})
    built = build_statefulset(of, SETTLED, build_pod_template(of, "image"))
    found = placed(built, Placement(("node-1",), ("old",)))
    affinity = found["spec"]["template"]["spec"]["affinity"]
    assert affinity["podAffinity"] == {}
    ours = affinity["nodeAffinity"][field][1]
    assert affinity["nodeAffinity"][field] == [theirs, ours]
    (rule,) = ours["preference"]["matchFields"]
    assert rule == {"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}
    assert found["spec"]["updateStrategy"] == {"type": "OnDelete"}
    # The hash of the template is that without the nodes: it is the spec's template still.
    key = names.TEMPLATE_ANNOTATION
    assert found["metadata"]["annotations"][key] == built["metadata"]["annotations"][key]
    assert found["metadata"]["annotations"][names.AVOIDED_NODES] == "node-1"


def test_pods_of_both_revisions_are_up_to_date_and_only_the_one_at_fault_goes() -> None:
    raw = replace(
        statefulset(replicas=2, current="old", update="new"), avoided=("node-1",), alike=("old",)
    )
    serving, faulty = pod("assistant-1", revision="old"), pod(revision="old", ready=False)
    one, pods = as_one(raw, (faulty, serving))
    assert one.current_revision == "new"
    assert [each.revision for each in pods] == ["new", "new"]
    seen = observed(llmdeployment(replicas=2), pods=pods, statefulset=one)
    assert next_step(seen, given_up=False) == SETTLED
    assert [each.name for each in stranded(seen, [FAULT])] == ["assistant-0"]
    # Not before the controller makes pods of the new template, nor once it has made this one.
    unseen = replace(seen, statefulset=replace(one, observed_generation=0))
    assert stranded(unseen, [FAULT]) == ()
    again = as_one(raw, (pod(revision="new", ready=False), serving))
    assert stranded(replace(seen, pods=again[1]), [FAULT]) == ()


def test_each_turn_is_told_with_how_to_end_it() -> None:
    (begun,) = avoidance_events([], [ENTRY])
    assert (begun.reason, begun.warning) == ("NodeAvoided", True)
    assert "node-1: used -> avoided for 24 h: pod assistant-0: Xid 79" in begun.message
    assert names.TRUSTED_NODES in begun.message
    assert avoidance_events([ENTRY], [entry("node-1", NOW + 9)]) == ()
    (ended,) = avoidance_events([ENTRY], [])
    assert (ended.message, ended.warning) == ("node node-1: avoided -> used", False)
