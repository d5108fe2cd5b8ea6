import base64
from typing import Any

import pytest

from plimsoll_operator.cluster import Cluster
from plimsoll_operator.credentials import make_credentials
from plimsoll_operator.observe import observe, read_credentials, read_statefulset
from plimsoll_operator.observed import StatefulSet, seconds
from support.resources import NOW, llmdeployment, pod, pod_body, time

Json = dict[str, Any]


def test_a_running_pod() -> None:
    seen = pod("assistant-11", ready_since=NOW - 5)
    assert (seen.name, seen.ordinal, seen.ip, seen.revision) == (
        "assistant-11",
        11,
        "10.244.0.7",
        "new",
    )
    assert seen.ready
    assert seen.ready_since == NOW - 5
    assert seen.container is not None
    assert seen.container.started
    assert seen.container.termination is None


def test_a_pod_that_waits_after_a_crash_keeps_the_end_of_its_last_life() -> None:
    ended = {
        "exitCode": 137,
        "reason": "OOMKilled",
        "message": "{}",
        "startedAt": time(NOW - 50),
        "finishedAt": time(NOW - 10),
    }
    container = pod(
        ready=False, waiting={"reason": "CrashLoopBackOff"}, last_terminated=ended, restarts=3
    ).container
    assert container is not None
    assert container.waiting == "CrashLoopBackOff"
    assert not container.ended
    assert not container.started
    assert container.restarts == 3
    assert container.termination is not None
    assert (container.termination.reason, container.termination.exit_code) == ("OOMKilled", 137)
    assert container.termination.finished_at == NOW - 10


def test_a_pod_that_no_node_fits() -> None:
    seen = pod(ready=False, unschedulable="0/1 nodes are available: 1 Insufficient amd.com/gpu.")
    assert seen.container is None
    assert seen.unschedulable is not None
    assert "amd.com/gpu" in seen.unschedulable


def test_times_are_read_with_and_without_fractions() -> None:
    assert seconds("2027-01-15T08:00:00Z") == NOW
    assert seconds("2027-01-15T08:00:00.500000Z") == NOW + 0.5


def test_a_statefulset() -> None:
    body: Json = {
        "metadata": {"generation": 4, "annotations": {"plimsoll.dev/template-hash": "abc"}},
        "spec": {"replicas": 2, "updateStrategy": {"rollingUpdate": {"partition": 1}}},
        "status": {"observedGeneration": 3, "currentRevision": "a", "updateRevision": "b"},
    }
    assert read_statefulset(body) == StatefulSet(2, 1, 4, 3, "a", "b", "abc")


WHOLE, OTHER = make_credentials("assistant", NOW), make_credentials("other", NOW)


def secret(**parts: bytes) -> Json:
    whole = {"tls.crt": WHOLE.certificate, "tls.key": WHOLE.key, "token": WHOLE.token}
    parts = whole | {name.replace("_", "."): content for name, content in parts.items()}
    return {"data": {name: base64.b64encode(content).decode() for name, content in parts.items()}}


def test_credentials_are_read_as_they_were_made() -> None:
    assert read_credentials(secret()) == WHOLE


@pytest.mark.parametrize("part", ["tls_crt", "tls_key", "token"])
@pytest.mark.parametrize(
    "content", [b"", b"garbage \n of two lines", b"\xff\xfe", "schlüssel".encode(), WHOLE.key[:-40]]
)
def test_a_damaged_part_makes_the_credentials_absent(part: str, content: bytes) -> None:
    assert read_credentials(secret(**{part: content})) is None


@pytest.mark.parametrize(
    "body",
    [
        secret(tls_key=OTHER.key),
        secret(tls_crt=WHOLE.key),
        {},
        {"data": None},
        {"data": {"tls.crt": "c"}},
        {"data": secret()["data"] | {"token": "not base64"}},
        {"data": secret()["data"] | {"token": None}},
    ],
)
def test_credentials_are_read_whole_or_not_at_all(body: Json) -> None:
    assert read_credentials(body) is None


class Listing(Cluster):
    """Has one StatefulSet and some pods, and nothing else."""

    def __init__(self, pods: list[Json]) -> None:
        self._pods = pods

    async def get(self, resource: Any, namespace: str, name: str) -> Json | None:
        if resource.kind != "StatefulSet":
            return None
        return {"metadata": {"uid": "set", "generation": 1}, "spec": {"replicas": 2}}

    async def find(self, resource: Any, namespace: str, label_selector: str) -> list[Json]:
        assert label_selector == (
            "app.kubernetes.io/instance=assistant,app.kubernetes.io/name=plimsoll-engine"
        )
        return self._pods


def owned_pod(name: str, owner: str) -> Json:
    body = pod_body(name)
    body["metadata"]["ownerReferences"] = [{"uid": owner, "controller": True}]
    return body


async def test_only_the_statefulsets_own_pods_are_seen_in_the_order_of_their_ordinals() -> None:
    pods = [
        owned_pod("assistant-10", "set"),
        owned_pod("assistant-2", "set"),
        owned_pod("assistant-0", "other"),
        pod_body("assistant-1"),
    ]

    listing = Listing(pods)
    seen = await observe(listing, listing, llmdeployment(), "plimsoll/engine:0.1.0")

    assert [pod.name for pod in seen.pods] == ["assistant-2", "assistant-10"]
    assert seen.changed_at == NOW - 3600, "the operator's own status writes do not count"
    assert seen.children["Service", "assistant"] is None
