"""Which pods are the target's, and where their pages are."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_operator.advisor.observe import read_advised
from plimsoll_operator.advisor.pages import page_url
from plimsoll_operator.advisor.spec import Advisor, TargetKind
from plimsoll_operator.advisor.target import belongs, pod_selector
from plimsoll_operator.tuning.values import Unknown
from support.advising import advisor_body, pod_body

Json = dict[str, Any]
TARGET = {"metadata": {"name": "vllm", "uid": "uid-target"}, "spec": {}}


def test_a_selector_is_written_as_requests_have_it() -> None:
    selector = {
        "matchLabels": {"b": "2", "a": "1"},
        "matchExpressions": [
            {"key": "c", "operator": "In", "values": ["x", "y"]},
            {"key": "d", "operator": "NotIn", "values": ["z"]},
            {"key": "e", "operator": "Exists"},
            {"key": "f", "operator": "DoesNotExist"},
        ],
    }
    target = {**TARGET, "spec": {"selector": selector}}
    found = pod_selector(TargetKind.DEPLOYMENT, target)
    assert found == "a=1,b=2,c in (x,y),d notin (z),e,!f"
    group = pod_selector(TargetKind.LEADER_WORKER_SET, TARGET)
    assert group == "leaderworkerset.sigs.k8s.io/name=vllm"


def owned(kind: str, name: str, uid: str, **labels: str) -> Json:
    owner = {"kind": kind, "name": name, "uid": uid, "controller": True}
    return {"metadata": {"name": "p", "labels": labels, "ownerReferences": [owner]}}


@pytest.mark.parametrize(
    ("kind", "pod", "ours"),
    [
        (TargetKind.DEPLOYMENT, pod_body(), True),
        (TargetKind.DEPLOYMENT, owned("ReplicaSet", "vllm-b-1", "u", **{"pod-template-hash": "1"}),
         False),
        (TargetKind.DEPLOYMENT, owned("StatefulSet", "vllm", "uid-target"), False),
        (TargetKind.DEPLOYMENT, {"metadata": {"name": "bare"}}, False),
        (TargetKind.STATEFUL_SET, owned("StatefulSet", "vllm", "uid-target"), True),
        # Of a predecessor with the same name.
        (TargetKind.STATEFUL_SET, owned("StatefulSet", "vllm", "uid-old"), False),
        (TargetKind.LEADER_WORKER_SET,
         owned("StatefulSet", "vllm-0", "u", **{"leaderworkerset.sigs.k8s.io/name": "vllm"}), True),
    ],
)  # fmt: skip
def test_only_what_the_target_made_is_its_own(kind: TargetKind, pod: Json, ours: bool) -> None:
    assert belongs(pod, kind, TARGET) is ours


def url(spec: Json, **pod: Any) -> str:
    advisor = Advisor.parse(advisor_body(**spec))
    found = page_url(advisor, read_advised(pod_body(**pod), 0, advisor))
    return found.message if isinstance(found, Unknown) else found


PORTS = [{"name": "metrics", "containerPort": 9100}, {"containerPort": 1}]


@pytest.mark.parametrize(
    ("spec", "pod", "expected"),
    [
        ({}, {}, "http://10.244.0.7:8000/metrics"),
        ({}, {"args": ["--port=9000"]}, "http://10.244.0.7:9000/metrics"),
        ({"metrics": {"port": 81}}, {"args": ["--port=9000"]}, "http://10.244.0.7:81/metrics"),
        (
            {"metrics": {"port": "metrics", "path": "/m", "scheme": "HTTPS"}},
            {"ports": PORTS},
            "https://10.244.0.7:9100/m",
        ),
        (
            {"metrics": {"port": "web"}},
            {"ports": PORTS},
            "its container has no port named web (spec.metrics.port)",
        ),
        ({"container": "main"}, {}, "it has no container main (spec.container)"),
    ],
)
def test_where_a_page_is(spec: Json, pod: Json, expected: str) -> None:
    assert url(spec, **pod) == expected


def test_the_container_that_runs_vllm_is_found_beside_others() -> None:
    body = pod_body()
    body["spec"]["containers"].insert(0, {"name": "envoy", "image": "envoy:1"})
    advised = read_advised(body, 0, Advisor.parse(advisor_body()))
    assert advised.flags.max_model_len == 32768
    assert advised.pod.container is not None
    assert advised.pod.container.memory_limit == "64Gi"
    assert advised.uses_device
