"""Room for one replica more, from nodes and pods as the API server has them."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_operator.plan.capacity import find_room, requests_of

Json = dict[str, Any]
GPU = "nvidia.com/gpu"


def node(name: str, gpus: int, **spec: Any) -> Json:
    labels, ready = spec.pop("labels", {}), spec.pop("ready", "True")
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
        "status": {
            "allocatable": {GPU: str(gpus), "memory": "64Gi"},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def pod_on(name: str | None, gpus: int, phase: str = "Running") -> Json:
    container = {"resources": {"limits": {GPU: str(gpus)}}}
    return {"spec": {"nodeName": name, "containers": [container]}, "status": {"phase": phase}}


def template(gpus: int = 4, memory: str = "32Gi", **spec: Any) -> Json:
    limits = {GPU: gpus, "memory": memory}
    return {"spec": {"containers": [{"resources": {"limits": limits}}], **spec}}


TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("nodes", "pods", "wanted", "found"),
    [
        ([node("a", 8)], [pod_on("a", 4)], template(), "a"),
        # one too few is none
        ([node("a", 8)], [pod_on("a", 5)], template(), None),
        # eight on two nodes are not four on one
        ([node("a", 3), node("b", 3)], [], template(), None),
        ([node("a", 3), node("b", 4)], [], template(), "b"),
        # what has ended holds nothing, and what has no node holds none yet
        ([node("a", 4)], [pod_on("a", 4, "Succeeded")], template(), "a"),
        ([node("a", 4)], [pod_on(None, 4, "Pending")], template(), "a"),
        # memory counts as well
        ([node("a", 8)], [], template(memory="96Gi"), None),
        # where no pod is let, none is
        ([node("a", 8, unschedulable=True)], [], template(), None),
        ([node("a", 8, ready="Unknown")], [], template(), None),
        ([node("a", 8)], [], template(nodeSelector={"gpu": "h200"}), None),
        ([node("a", 8, labels={"gpu": "h200"})], [], template(nodeSelector={"gpu": "h200"}), "a"),
        ([node("a", 8, taints=[TAINT])], [], template(), None),
        (
            [node("a", 8, taints=[TAINT])], [],
            template(tolerations=[{"key": GPU, "operator": "Exists"}]), "a",
        ),
        (
            [node("a", 8, taints=[TAINT])], [],
            template(tolerations=[{"key": GPU, "value": "other"}]), None,
        ),
        ([node("a", 8, taints=[{**TAINT, "effect": "PreferNoSchedule"}])], [], template(), "a"),
        # a node that has no such resource
        ([{"metadata": {"name": "a"}, "status": {"allocatable": {"memory": "1Ti"},
          "conditions": [{"type": "Ready", "status": "True"}]}}], [], template(), None),
    ],
)  # fmt: skip
def test_where_a_replica_fits(
    nodes: list[Json], pods: list[Json], wanted: Json, found: str | None
) -> None:
    assert find_room(nodes, pods, wanted) == found


def test_what_a_pod_asks_for() -> None:
    def asks(**amounts: str) -> Json:
        return {"resources": {"requests": amounts}}

    assert requests_of(
        {
            "containers": [asks(cpu="500m"), asks(cpu="1", memory="1Gi")],
            "initContainers": [
                {**asks(cpu="250m"), "restartPolicy": "Always"},
                asks(cpu="1", memory="4Gi"),
            ],
        }
    ) == {"cpu": 1.75, "memory": 4.0 * 1024**3}
