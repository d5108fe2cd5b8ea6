"""Whatever stands in status or a MemoryProfile, a pass goes through; an exception is shown."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plimsoll_operator.controller import Controller, Options
from plimsoll_operator.observed import read_status
from plimsoll_operator.reconcile import Passed, reconcile
from plimsoll_operator.shape import read_time
from plimsoll_operator.tuning.profile import read_learned
from plimsoll_operator.tuning.record import read_state, write_time
from plimsoll_operator.tuning.values import Rule
from plimsoll_operator.workers import Key
from support.memory_cluster import MemoryCluster, SilentEngines
from support.resources import NOW, llmdeployment, time
from support.tuning import reading

Json = dict[str, Any]
KEY = Key("default", "assistant")
SPEC: Json = {"tuning": {"maxModelLen": {"minAllowed": 512}}, "engine": {"maxModelLen": 8192}}

CHANGE = {
    "time": time(NOW - 99),
    "parameter": "gpuMemoryUtilization",
    "from": 0.9,
    "to": 0.8,
    "rule": "oom",
}
CONDITION = {
    "type": "Ready",
    "status": "True",
    "reason": "Serving",
    "message": "1 of 1",
    "observedGeneration": 1,
    "lastTransitionTime": time(NOW - 99),
}
BLOCKED = {
    "gpuMemoryUtilization": 0.9,
    "retreat": 0.8,
    "time": time(NOW - 99),
    "class": "CudaOOMAtStart",
    "count": 1,
}
STATUS: Json = {
    "conditions": [CONDITION],
    "effective": {"maxModelLen": 4096, "gpuMemoryUtilization": 0.8, "source": "Tuned"},
    "failures": {"last": {"time": time(NOW - 99), "pod": "assistant-0", "class": "EngineDead"}},
    "revision": {"lastKnownGood": "old", "blocked": ["bad"]},
    "load": {"time": time(NOW - 9)},
    "tuning": {
        "mode": "Auto",
        "current": {"maxModelLen": 4096, "gpuMemoryUtilization": 0.8},
        "tuned": {"gpuMemoryUtilization": 0.8},
        "basis": {"gpuMemoryUtilization": 0.9},
        "revision": 3,
        "revisedAt": time(NOW - 99),
        "generation": 1,
        "history": [CHANGE],
        "handledFailures": ["uid/1"],
        "startFailures": {"assistant-0": 1},
        "metricsAvailable": True,
    },
    "oom": {"total": 1, "hostMemory": True, "last": {"time": time(NOW - 99), "class": "CgroupOOM"}},
}
PROFILE: Json = {"blocked": [BLOCKED], "lastKnownGood": 0.85, "lastOOMTime": time(NOW - 99)}


def paths(value: Any) -> list[tuple[str | int, ...]]:
    """Of every part of a document, the whole included."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    inner = [
        (key, *path)
        for key, part in parts
        for path in (paths(part) if isinstance(part, dict | list) else [()])
    ]
    return [(), *inner]


def replaced(document: Json, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(document)
    place: Any = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return changed


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from([10**400, -1, 0, 2**63, 1e308, "Off", "0001-01-01T00:00:00+14:00", "9999-12-31"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["time", "type", "class", "last", "history", "blocked", "x"]), inner, max_size=3
    ),
    max_leaves=8,
)  # fmt: skip
DEATH = {
    "exitCode": 137,
    "reason": "OOMKilled",
    "startedAt": time(NOW - 50),
    "finishedAt": time(NOW - 10),
}


def one_pass(status: Any, profile: Any = None, *, dead: bool = False) -> MemoryCluster:
    resource = llmdeployment(**SPEC)
    resource["status"] = status
    state: Json = {"last_terminated": DEATH, "restarts": 1, "ready": False} if dead else {}
    stored = None if profile is None else {"status": profile}
    cluster = MemoryCluster(resource, profile=stored, **state)
    engines = SilentEngines(reading("assistant-0", NOW))

    async def passes() -> None:
        carried = None
        for later in (0.0, 1.0):
            done = await reconcile(
                cluster, engines, KEY, engine_image="e", carried=carried, now=NOW + later
            )
            assert done is not None
            carried = done.carried

    asyncio.run(passes())
    return cluster


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from(paths(STATUS)), value=JSON, dead=st.booleans())
@example(path=("tuning", "history", 0, "parameter"), value="batchBudget", dead=False)
@example(path=("tuning", "history", 0, "rule"), value="newer-rule", dead=False)
@example(path=("tuning", "mode"), value="Newer", dead=False)
@example(path=("failures", "last"), value={"pod": "assistant-0"}, dead=True)
@example(path=("oom", "last", "class"), value="NewerOOM", dead=True)
def test_no_status_makes_a_pass_raise(path: tuple[str | int, ...], value: Any, dead: bool) -> None:
    cluster = one_pass(replaced(STATUS, path, value), dead=dead)
    assert cluster.condition("Ready")["status"] in ("True", "False")


@settings(max_examples=75, deadline=None)
@given(path=st.sampled_from(paths(PROFILE)), value=JSON, dead=st.booleans())
@example(path=("blocked", 0, "class"), value="Bogus", dead=True)
def test_no_profile_makes_a_pass_raise(path: tuple[str | int, ...], value: Any, dead: bool) -> None:
    one_pass({}, replaced(PROFILE, path, value), dead=dead)


@pytest.mark.parametrize(
    "damage",
    [{"parameter": "batchBudget"}, {"rule": "newer"}, {"time": None}, {"to": "much"}, {"from": None}],
)  # fmt: skip
def test_one_unreadable_entry_of_the_history_costs_only_itself(damage: Json) -> None:
    history = [CHANGE, {**CHANGE, **damage}, {**CHANGE, "rule": "calm"}]
    state = read_state({"tuning": {**STATUS["tuning"], "history": history}})
    assert [change.rule for change in state.history] == [Rule.OOM, Rule.CALM]
    assert (state.revision, state.handled) == (3, ("uid/1",))


def test_one_unreadable_entry_of_a_profile_costs_only_itself() -> None:
    learned = read_learned({"status": {**PROFILE, "blocked": [{**BLOCKED, "class": "X"}, BLOCKED]}})
    assert [blocked.utilization for blocked in learned.blocked] == [0.9]
    assert learned.last_known_good == 0.85


def test_a_whole_status_is_read_as_it_is() -> None:
    assert read_status({"status": STATUS}) == STATUS


@given(st.text() | st.datetimes().map(str) | st.datetimes().map(lambda at: f"{at.isoformat()}Z"))
def test_a_time_that_was_read_can_be_written(text: str) -> None:
    seconds = read_time(text)
    if seconds is not None:
        assert write_time(seconds) is not None


async def test_what_another_owner_keeps_in_status_is_not_fought_for_ever() -> None:
    cluster = MemoryCluster(llmdeployment(**SPEC))
    cluster.foreign = {"tuning": {"history": [{"rule": "by-hand"}]}, "resolvedRevision": "mine"}
    cluster.resource["status"] = copy.deepcopy(cluster.foreign)
    carried = None
    for second in range(20):
        done = await reconcile(
            cluster,
            SilentEngines(reading("assistant-0", NOW)),
            KEY,
            engine_image="e",
            carried=carried,
            now=NOW + second,
        )
        assert isinstance(done, Passed)
        carried = done.carried
    assert "history" not in cluster.resource["status"]["tuning"]
    assert cluster.resource["status"]["resolvedRevision"] == "mine"
    assert cluster.status_writes <= 4


class Broken(SilentEngines):
    async def read(self, deployment: Any, pods: Any) -> Any:
        raise ZeroDivisionError("a bug")


async def failing_pass(controller: Controller) -> None:
    with pytest.raises(ZeroDivisionError):
        await controller._pass(KEY)


async def test_an_exception_is_shown_once_it_lasts_and_goes_with_its_cause() -> None:
    cluster = MemoryCluster(llmdeployment(**SPEC))
    engines = SilentEngines(reading("assistant-0", NOW))
    controller = Controller(Options("e"), engines)
    controller._cluster = cluster
    for _ in range(3):
        await controller._pass(KEY)
    assert cluster.condition("Degraded")["status"] == "False"
    cluster.events.clear()

    controller._engines = Broken()
    await failing_pass(controller)
    assert cluster.condition("Degraded")["status"] == "False", "one lost request is no news"
    for _ in range(4):
        await failing_pass(controller)
    ready, degraded = cluster.condition("Ready"), cluster.condition("Degraded")
    assert (ready["status"], ready["reason"]) == ("Unknown", "ReconcileFailed")
    assert (degraded["status"], degraded["reason"]) == ("True", "ReconcileFailed")
    assert "ZeroDivisionError: a bug" in ready["message"]
    assert [event["reason"] for event in cluster.events] == ["ReconcileFailed"]

    controller._engines = engines
    await controller._pass(KEY)
    assert cluster.condition("Degraded")["status"] == "False"
    assert cluster.condition("Ready")["status"] != "Unknown"
