"""Readings of the cluster: what could not be read is None, and a death is counted once."""

from typing import Any

import aiohttp
import pytest

from plimsoll_local.demo.watch import (
    UNREAD,
    Death,
    Decision,
    count_restarts,
    find_condition,
    find_deaths,
    parse_gauges,
    read_decisions,
    scrape,
)
from support.fake_engine import FakeEngine

PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
# TYPE plimsoll:max_model_len_admitted gauge
plimsoll:max_model_len_admitted{engine="0",model_name="m"} 2048.0
# TYPE plimsoll:max_model_len_ceiling gauge
plimsoll:max_model_len_ceiling{engine="0",model_name="m"} 4096.0
# TYPE plimsoll:gpu_memory_utilization gauge
plimsoll:gpu_memory_utilization{engine="0",model_name="m"} 0.85
"""


def pod(uid: str, restarts: int, state: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    status = {"restartCount": restarts, "state": state, "lastState": last}
    return {"metadata": {"uid": uid}, "status": {"containerStatuses": [status]}}


def ended(container: str, reason: str, code: int) -> dict[str, Any]:
    return {"terminated": {"containerID": container, "reason": reason, "exitCode": code}}


def test_a_page_is_read_by_name_and_the_missing_is_unknown() -> None:
    gauges = parse_gauges(PAGE)
    assert (gauges.running, gauges.waiting, gauges.kv_usage) == (3, 5, 0.5)
    assert (gauges.admitted_length, gauges.ceiling, gauges.utilization) == (2048, 4096, 0.85)
    assert gauges.preemptions == 2
    assert gauges.free_bytes_low_water is None


async def test_an_engine_that_does_not_answer_is_unread() -> None:
    async with aiohttp.ClientSession() as http:
        async with FakeEngine(metrics=PAGE) as engine:
            assert (await scrape(http, engine.url)).running == 3
            engine.metrics = "this is not { a page"
            assert await scrape(http, engine.url) == UNREAD
        assert await scrape(http, engine.url) == UNREAD


def test_a_death_in_state_and_in_last_state_is_one() -> None:
    died = ended("c1", "OOMKilled", 137)
    first = find_deaths([pod("p", 0, died, {})])
    later = find_deaths([pod("p", 1, {"running": {}}, died)])
    assert first == later == {Death("p", "c1", "OOMKilled", 137)}


def test_deaths_of_two_pods_are_two() -> None:
    pods = [
        pod("p", 1, {"running": {}}, ended("c", "OOMKilled", 137)),
        pod("q", 1, {"running": {}}, ended("c", "OOMKilled", 137)),
    ]
    assert len(find_deaths(pods)) == 2


def test_a_pod_without_statuses_has_no_deaths_and_no_restarts() -> None:
    pending = {"metadata": {"uid": "p"}, "status": {}}
    assert find_deaths([pending]) == frozenset()
    assert count_restarts([pending]) == {"p": 0}


def test_decisions_are_read_oldest_first() -> None:
    newer = {"time": "2026-01-01T00:00:09Z", "parameter": "maxModelLen", "from": 4096, "to": 2048}
    older = {"time": "2026-01-01T00:00:01Z", "parameter": "poolBlocks", "from": 9, "to": 5}
    resource = {"status": {"tuning": {"history": [newer, older]}}}
    assert [decision.parameter for decision in read_decisions(resource)] == [
        "poolBlocks",
        "maxModelLen",
    ]
    assert read_decisions(resource)[1] == Decision(
        "2026-01-01T00:00:09Z", "maxModelLen", "4096", "2048", ""
    )
    assert read_decisions({}) == ()


@pytest.mark.parametrize(("generation", "found"), [(3, True), (2, False)])
def test_a_condition_of_an_older_generation_does_not_count(generation: int, found: bool) -> None:
    resource = {
        "metadata": {"generation": 3},
        "status": {
            "conditions": [{"type": "Ready", "status": "True", "observedGeneration": generation}]
        },
    }
    assert (find_condition(resource, "Ready") is not None) is found
