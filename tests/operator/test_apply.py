import copy
from typing import Any

import pytest

from plimsoll_operator.apply import apply_children, apply_status, difference, is_applied, stamped
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


def live(wanted: Json) -> Json:
    found = copy.deepcopy(stamped(wanted))
    found["metadata"]["uid"] = "uid-1"
    return found


def test_a_removed_field_counts_as_a_difference() -> None:
    cluster_has = live(body(a=1, b=2))
    assert is_applied(body(a=1, b=2), cluster_has)
    assert not is_applied(body(a=1), cluster_has)


def test_drift_counts_as_a_difference() -> None:
    cluster_has = live(body(a=1))
    cluster_has["spec"]["a"] = 9
    assert not is_applied(body(a=1), cluster_has)


class Recorder(Cluster):
    """Answers every write, except of what it is told to refuse."""

    def __init__(self, refuse: ApiError | None = None) -> None:
        self.requests: list[str] = []
        self.bodies: list[Json] = []
        self._refuse = refuse

    async def _request(self, method: str, path: str, **options: Any) -> Json:
        self.requests.append(f"{method} {path}")
        self.bodies.append(options.get("body") or {})
        if self._refuse is not None:
            raise self._refuse
        return {}


KEY = ("Service", "assistant")
PATH = "/api/v1/namespaces/default/services/assistant"


# Case B01.
async def test_a_settled_child_causes_no_request() -> None:
    cluster = Recorder()
    assert await apply_children(cluster, {KEY: body(a=1)}, {KEY: live(body(a=1))}) == ()
    assert cluster.requests == []


@pytest.mark.parametrize("present", [None, live(body(a=9))])
async def test_a_missing_or_different_child_is_applied(present: Json | None) -> None:
    cluster = Recorder()
    await apply_children(cluster, {KEY: body(a=1)}, {KEY: present})
    assert cluster.requests == [f"PATCH {PATH}"]


async def test_none_means_that_the_child_must_not_exist() -> None:
    cluster = Recorder()
    await apply_children(cluster, {KEY: None}, {KEY: live(body())})
    await apply_children(cluster, {KEY: None}, {KEY: None})
    assert cluster.requests == [f"DELETE {PATH}"]
    assert cluster.bodies[0] == {"preconditions": {"uid": "uid-1"}}


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
    refusals = await apply_children(cluster, {KEY: body()}, {KEY: None})
    assert [refusal.reason for refusal in refusals] == ["Refused"]
    assert refusals[0].message == f"Service assistant: {words}"


async def test_a_server_in_trouble_is_no_refusal() -> None:
    with pytest.raises(ApiError):
        await apply_children(
            Recorder(refuse=ApiError(500, "etcd is away")), {KEY: body()}, {KEY: None}
        )


async def test_the_status_is_written_to_exactly_this_object() -> None:
    cluster = Recorder()
    await apply_status(cluster, llmdeployment(), {"replicas": 1})
    assert cluster.requests == [
        "PATCH /apis/plimsoll.dev/v1alpha1/namespaces/default/llmdeployments/assistant/status"
    ]
    assert cluster.bodies[0]["metadata"]["uid"] == "uid-assistant"
    assert "spec" not in cluster.bodies[0]
