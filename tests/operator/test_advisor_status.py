"""The status of a MemoryAdvisor: what the schema has, what survives a restart, what is a write."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from plimsoll_operator import cluster as api
from plimsoll_operator.advisor.pages import Pages
from plimsoll_operator.advisor.passes import Carried, run_pass
from plimsoll_operator.advisor.record import read_known
from plimsoll_operator.cli.definitions import own_definitions, schema_of
from plimsoll_operator.cluster import ApiError, Cluster, Resource
from plimsoll_operator.metrics_page import read_page
from plimsoll_operator.observed import read_status
from plimsoll_operator.workers import Key
from support.advising import Scene, advisor_body, pod_body, vllm_page
from support.resources import NOW, time

Json = dict[str, Any]
KEY = Key("default", "advisor")
KILLED = {
    "reason": "OOMKilled",
    "exitCode": 137,
    "startedAt": time(NOW - 3000),
    "finishedAt": time(NOW - 30),
}


def status_schema(name: str) -> Json:
    schema = schema_of(own_definitions()[f"{name}.plimsoll.dev"], "v1alpha1")
    assert schema is not None
    found: Json = schema["properties"]["status"]
    return found


def strangers(schema: Json, value: object, path: str = "status") -> Iterator[str]:
    """Paths that the API server would not take."""
    if isinstance(value, dict):
        for key, part in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if inner is None:
                yield f"{path}.{key}"
            else:
                yield from strangers(inner, part, f"{path}.{key}")
    elif isinstance(value, list):
        most = schema.get("maxItems")
        if most is None or len(value) > most:
            yield f"{path}: {len(value)} items"
        for part in value:
            yield from strangers(schema["items"], part, f"{path}[]")
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value}"


def busy_scene() -> Scene:
    """Every part of the status has something in it."""
    return copy.deepcopy(_busy_scene())


@functools.cache
def _busy_scene() -> Scene:
    scene = Scene(advisor_body(tuning={"maxModelLen": {"minAllowed": 4096}}))
    scene.pods = [
        pod_body(args=["--model=m", "--max-num-seqs=x", "--max-model-len=32768"]),
        pod_body("vllm-5d8f-b", last_terminated=KILLED, restarts=1, created=NOW - 7200),
    ]
    # Over the end of a window of five minutes.
    for i in range(24):
        scene.see(usage=0.99, waiting=30, running=100, ended=i, preemptions=5.0 * i)
    return scene


def test_every_field_that_is_written_is_in_the_schema() -> None:
    status = busy_scene().status
    assert {"unread", "recommendation", "history", "traffic", "learned", "load"} <= set(status)
    assert list(strangers(status_schema("memoryadvisors"), status)) == []


def test_the_tuners_parts_have_the_form_that_they_have_elsewhere() -> None:
    ours, theirs = status_schema("memoryadvisors")["properties"], status_schema("llmdeployments")
    for part in ("tuning", "oom", "failures"):
        assert ours[part]["properties"] == theirs["properties"][part]["properties"]
    learned = status_schema("memoryprofiles")["properties"]
    assert ours["learned"]["properties"] == learned


def test_a_restarted_operator_goes_on_from_the_status() -> None:
    one, other = busy_scene(), busy_scene()
    assert one.known is not None
    assert read_known(one.status, one.now).learned == one.known.learned
    other.restart()
    for scene in (one, other):
        for _ in range(3):
            scene.see(usage=0.5, waiting=0, running=3, ended=23, preemptions=115.0)
    # Of peaks the open window is lost.
    for part in ("history", "oom", "recommendation", "current"):
        assert one.status[part] == other.status[part], part
    assert one.status["traffic"]["preemptions"] == other.status["traffic"]["preemptions"]


class OnePod(Pages):
    def __init__(self) -> None:
        self.page: Json = {}
        self.looks = 0

    async def read(self, advisor: Any, pods: Any) -> Any:
        self.looks += 1
        page: Json = {"steps": 1.0, "running": 0, **self.page}
        text = vllm_page(**page)
        at = NOW + 15 * self.looks
        return {pod.name: read_page(text, pod=pod.name, model=None, at=at) for pod in pods}


class ReadOnlyCluster(Cluster):
    """Has a Deployment with one pod; counts the writes, and takes no other."""

    def __init__(self, resource: Json, target: Json | ApiError | None = None) -> None:
        self.resource, self.target = resource, target
        self.status_writes, self.events = 0, list[Json]()

    async def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        if resource is api.MEMORY_ADVISOR:
            return copy.deepcopy(self.resource)
        if isinstance(self.target, ApiError):
            raise self.target
        return self.target

    async def find(self, resource: Resource, namespace: str, label_selector: str) -> list[Json]:
        assert label_selector == "app=vllm"
        return [pod_body(), {**pod_body("other"), "metadata": {"name": "other", "labels": {}}}]

    async def apply_status(self, resource: Resource, body: Json) -> Json:
        assert (resource, body["kind"]) == (api.MEMORY_ADVISOR, "MemoryAdvisor")
        self.status_writes += 1
        self.resource["status"] = copy.deepcopy(body["status"])
        return copy.deepcopy(self.resource)

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        assert resource is api.EVENT
        self.events.append(body)
        return body

    def condition(self, kind: str) -> Json:
        found: Json = next(c for c in self.resource["status"]["conditions"] if c["type"] == kind)
        return found


TARGET = {
    "kind": "Deployment",
    "metadata": {"name": "vllm", "uid": "uid-d"},
    "spec": {"selector": {"matchLabels": {"app": "vllm"}}},
}


async def run(cluster: ReadOnlyCluster, pages: OnePod, passes: int, begin: int = 0) -> int:
    carried: Carried | None = None
    for i in range(begin, begin + passes):
        passed = await run_pass(cluster, pages, KEY, carried=carried, now=NOW + 15 * i)
        assert passed is not None
        carried = passed.carried
    return begin + passes


async def test_an_idle_advisor_writes_once_and_a_restarted_one_nothing() -> None:
    cluster, pages = ReadOnlyCluster(advisor_body(), TARGET), OnePod()
    at = await run(cluster, pages, 20)
    assert cluster.resource["status"]["podsSummary"] == "1/1"
    # The second look knows rates.
    assert cluster.status_writes <= 2
    written = cluster.status_writes
    await run(cluster, pages, 20, begin=at)
    assert cluster.status_writes == written
    assert [event["reason"] for event in cluster.events] == ["Advising"]
    assert cluster.events[0]["involvedObject"]["kind"] == "MemoryAdvisor"


async def test_what_only_follows_the_traffic_is_written_every_half_minute() -> None:
    cluster, pages = ReadOnlyCluster(advisor_body(), TARGET), OnePod()
    carried: Carried | None = None
    for i in range(20):
        # Preempted below half a cache: for another reason than its size.
        pages.page = {"running": 3, "usage": 0.3 + i / 100, "ended": 9 * i, "preemptions": 1.0 * i}
        passed = await run_pass(cluster, pages, KEY, carried=carried, now=NOW + 15 * i)
        assert passed is not None
        carried = passed.carried
    assert cluster.resource["status"]["traffic"]["preemptions"] >= 17
    # 285 s; the first two looks tell something new.
    assert 9 <= cluster.status_writes <= 12


async def test_a_new_advice_is_one_event() -> None:
    cluster, pages = ReadOnlyCluster(advisor_body(), TARGET), OnePod()
    carried, preempted = None, 0.0
    for i in range(8):
        pages.page = {"usage": 0.99, "running": 90, "waiting": 9, "preemptions": preempted}
        pages.page["steps"] = float(i)
        preempted += 50
        passed = await run_pass(cluster, pages, KEY, carried=carried, now=NOW + 15 * i)
        assert passed is not None
        carried = passed.carried
    told = [e["message"] for e in cluster.events if e["reason"] == "ChangeAdvised"]
    assert len(told) == 1
    assert told[0].startswith("--max-num-seqs=")


@pytest.mark.parametrize(
    ("kind", "target", "reason", "said"),
    [
        ("Deployment", None, "NotFound", "there is no Deployment vllm in namespace default"),
        ("LeaderWorkerSet", None, "NotFound", "or the cluster has no LeaderWorkerSets"),
        ("StatefulSet", ApiError(403, "no"), "Forbidden", "may not read StatefulSet vllm: no"),
    ],
)
async def test_a_target_that_cannot_be_had_is_a_condition(
    kind: str, target: ApiError | None, reason: str, said: str
) -> None:
    cluster = ReadOnlyCluster(advisor_body(kind), target)
    await run(cluster, OnePod(), 2)
    for condition in ("TargetFound", "Ready"):
        found = cluster.condition(condition)
        assert (found["status"], found["reason"]) == ("False", reason)
        assert said in found["message"]
    assert cluster.status_writes == 1


async def test_what_is_gone_has_no_further_pass() -> None:
    cluster = ReadOnlyCluster(advisor_body())
    cluster.resource["metadata"]["deletionTimestamp"] = time(NOW)
    assert await run_pass(cluster, OnePod(), KEY, carried=None, now=NOW) is None


JUNK: tuple[Any, ...] = (None, "x", -1, 1e308, [], {}, [{}], {"a": "b"})


def places(value: Any) -> Iterator[tuple[str | int, ...]]:
    """Of every part of a document."""
    if not isinstance(value, dict | list):
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield (key,)
        yield from ((key, *place) for place in places(part))


def test_whatever_stands_in_the_status_a_pass_goes_through() -> None:
    whole = busy_scene().status
    for place in places(whole):
        for junk in JUNK:
            status = copy.copy(whole)
            part: Any = status
            for key in place[:-1]:
                part[key] = copy.copy(part[key])
                part = part[key]
            part[place[-1]] = junk
            known = read_known(read_status({"status": status}), NOW)
            assert known.traffic.since >= 0
    scene = busy_scene()
    for part in list(whole):
        scene.restart()
        scene.resource["status"] = {**whole, part: {"a": ["b"]}}
        scene.see()
        assert scene.condition("TargetFound")["status"] == "True"
