import copy
from typing import Any

import pytest

from plimsoll_operator.apply import (
    FRUITLESS_SECONDS,
    Applied,
    Fruitless,
    apply_children,
    apply_status,
    difference,
    drift,
    stamped,
)
from plimsoll_operator.cluster import ApiError, Cluster
from support.resources import llmdeployment

Json = dict[str, Any]


@pytest.mark.parametrize(
    ("wanted", "live", "found"),
    [
        ({"a": 1}, {"a": 1, "default": True}, None),
        ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 2, "d": 3}]}}, None),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b: 2 -> 1"),
        ({"a": {"b": 1}}, {}, 'a: null -> {"b": 1}'),
        ({"a": [1, 2]}, {"a": [1]}, "a: [1] -> [1, 2]"),
        ({"a": [{"b": "x"}]}, {"a": [{"b": "y"}]}, 'a[0].b: "y" -> "x"'),
        # the server drops what is empty
        ({"a": {}, "b": "", "c": []}, {}, None),
        # and writes quantities its own way, where there are quantities
        ({"limits": {"cpu": "1000m", "memory": "1024Mi"}}, {"limits": {"cpu": "1", "memory": "1Gi"}}, None),
        ({"limits": {"cpu": "1001m"}}, {"limits": {"cpu": "1"}}, 'limits.cpu: "1" -> "1001m"'),
        ({"divisor": "1024Ki"}, {"divisor": "1Mi"}, None),
        ({"divisor": 1}, {"divisor": "1"}, None),
        ({"emptyDir": {"sizeLimit": "1024Ki"}}, {"emptyDir": {"sizeLimit": "1Mi"}}, None),
        ({"args": ["1000m"]}, {"args": ["1"]}, 'args[0]: "1" -> "1000m"'),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(wanted: Json, live: Json, found: str | None) -> None:
    assert difference(wanted, live) == found


def body(**spec: Any) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "assistant", "namespace": "default"},
        "spec": spec,
    }


OURS = {
    "manager": "plimsoll-operator",
    "operation": "Apply",
    "apiVersion": "v1",
    "fieldsType": "FieldsV1",
}
THEIRS = {
    "manager": "kubectl-patch",
    "operation": "Update",
    "apiVersion": "v1",
    "fieldsType": "FieldsV1",
}


def live(wanted: Json, foreign: Json | None = None) -> Json:
    """As the server has it after an apply; ``foreign`` are fields of spec that somebody else set."""
    found = copy.deepcopy(stamped(wanted))
    own: Json = {f"f:{key}": {} for key in wanted["spec"]}
    managed = [{**OURS, "fieldsV1": {"f:metadata": {}, "f:spec": own}}]
    if foreign is not None:
        managed.append({**THEIRS, "fieldsV1": {"f:spec": foreign}})
    found["metadata"] |= {"uid": "uid-1", "resourceVersion": "7", "managedFields": managed}
    return found


def test_a_removed_field_counts_as_a_difference() -> None:
    cluster_has = live(body(a=1, b=2))
    assert drift(stamped(body(a=1, b=2)), cluster_has) is None
    assert drift(stamped(body(a=1)), cluster_has) is not None


def test_drift_counts_as_a_difference() -> None:
    cluster_has = live(body(a=1))
    cluster_has["spec"]["a"] = 9
    assert drift(stamped(body(a=1)), cluster_has) == "spec.a: 9 -> 1"


def test_a_field_that_somebody_else_added_counts_and_a_default_does_not() -> None:
    wanted = stamped(body(a=1))
    cluster_has = live(body(a=1))
    cluster_has["spec"]["default"] = True
    assert drift(wanted, cluster_has) is None
    cluster_has = live(body(a=1), foreign={"f:b": {}})
    assert drift(wanted, cluster_has) == 'set by somebody else: {"f:spec": {"f:b": {}}}'


def test_an_object_that_does_not_say_what_was_applied_is_applied_again() -> None:
    cluster_has = live(body(a=1))
    cluster_has["metadata"]["managedFields"] = []
    assert drift(stamped(body(a=1)), cluster_has) is not None


class Recorder(Cluster):
    """Answers every write, except of what it is told to refuse."""

    def __init__(self, refuse: ApiError | None = None, version: str = "8") -> None:
        self.requests: list[str] = []
        self.bodies: list[Json] = []
        self._refuse = refuse
        self._version = version

    async def _request(self, method: str, path: str, **options: Any) -> Json:
        self.requests.append(f"{method} {path}")
        self.bodies.append(options.get("body") or {})
        if self._refuse is not None:
            raise self._refuse
        return {"metadata": {"resourceVersion": self._version}}


KEY = ("Service", "assistant")
PATH = "/api/v1/namespaces/default/services/assistant"
NOW = 1_800_000_000.0


async def pass_over(
    cluster: Recorder,
    wanted: Json | None,
    present: Json | None,
    *,
    last: Applied = Applied(),  # noqa: B008 - frozen
    now: float = NOW,
) -> Applied:
    return await apply_children(cluster, {KEY: wanted}, {KEY: present}, last.fruitless, now)


# Case B01.
async def test_a_settled_child_causes_no_request() -> None:
    cluster = Recorder()
    assert await pass_over(cluster, body(a=1), live(body(a=1))) == Applied()
    assert cluster.requests == []


@pytest.mark.parametrize("present", [None, live(body(a=9))])
async def test_a_missing_or_different_child_is_applied(present: Json | None) -> None:
    cluster = Recorder()
    await pass_over(cluster, body(a=1), present)
    assert cluster.requests == [f"PATCH {PATH}"]


async def test_none_means_that_the_child_must_not_exist() -> None:
    cluster = Recorder()
    await pass_over(cluster, None, live(body()))
    await pass_over(cluster, None, None)
    assert cluster.requests == [f"DELETE {PATH}"]
    assert cluster.bodies[0] == {
        "preconditions": {"uid": "uid-1"},
        "propagationPolicy": "Background",
    }


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, "denied by policy"),
        (422, "spec.ports: Required value"),
        (500, "failed to create typed patch object (...): .spec.ports: expected list"),
    ],
)
async def test_what_the_server_refuses_comes_back_in_its_words(status: int, words: str) -> None:
    cluster = Recorder(refuse=ApiError(status, words))
    refusals = (await pass_over(cluster, body(), None)).refusals
    assert [refusal.reason for refusal in refusals] == ["Refused"]
    assert refusals[0].message == f"Service assistant: {words}"


async def test_a_server_in_trouble_is_no_refusal() -> None:
    with pytest.raises(ApiError):
        await pass_over(Recorder(refuse=ApiError(500, "etcd is away")), body(), None)


async def test_what_somebody_else_added_is_seized_and_then_applied_away() -> None:
    cluster = Recorder()
    done = await pass_over(cluster, body(a=1), live(body(a=1), foreign={"f:b": {}}))
    assert cluster.requests == [f"PATCH {PATH}"] * 2
    seizure, apply = cluster.bodies
    assert seizure["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"] == {"f:a": {}, "f:b": {}}
    assert seizure["metadata"]["resourceVersion"] == "7"
    assert apply == stamped(body(a=1))
    assert done == Applied()


async def test_an_apply_that_changes_nothing_is_said_once_and_put_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Recorder(version="7")
    webhooked = live(body(a=1))
    webhooked["spec"]["a"] = 9
    first = await pass_over(cluster, body(a=1), webhooked)
    assert isinstance(first.fruitless[KEY], Fruitless)
    second = await pass_over(cluster, body(a=1), webhooked, last=first, now=NOW + 5)
    assert second == first
    assert len(cluster.requests) == 1

    late = NOW + FRUITLESS_SECONDS
    third = await pass_over(cluster, body(a=1), webhooked, last=second, now=late)
    assert third.fruitless[KEY].at == late
    assert len(cluster.requests) == 2
    assert caplog.messages == [
        "Service default/assistant: an apply is accepted and changes nothing at spec.a"
    ]


@pytest.mark.parametrize("change", ["wanted", "live", "foreign"])
async def test_whatever_changes_ends_the_wait(change: str) -> None:
    webhooked = live(body(a=1))
    webhooked["spec"]["a"] = 9
    last = await pass_over(Recorder(version="7"), body(a=1), webhooked)
    wanted = body(a=1)
    if change == "wanted":
        wanted = body(a=2)
    elif change == "live":
        webhooked["spec"]["a"] = 10
    else:
        webhooked = live(body(a=1), foreign={"f:b": {}}) | {"spec": {"a": 9, "b": 1}}
    cluster = Recorder()
    assert (await pass_over(cluster, wanted, webhooked, last=last)).fruitless == {}
    assert cluster.requests


async def test_the_status_is_written_to_exactly_this_object() -> None:
    cluster = Recorder()
    await apply_status(cluster, llmdeployment(), {"replicas": 1})
    assert cluster.requests == [
        "PATCH /apis/plimsoll.dev/v1alpha1/namespaces/default/llmdeployments/assistant/status"
    ]
    assert cluster.bodies[0]["metadata"]["uid"] == "uid-assistant"
    assert "spec" not in cluster.bodies[0]
