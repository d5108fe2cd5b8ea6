"""What kubelet and Prometheus read of the operator."""

from __future__ import annotations

import socket

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from plimsoll_operator.endpoints import Readiness, serve
from plimsoll_operator.telemetry import Standing, Telemetry


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def read(port: int, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    ("readiness", "status"),
    [
        (Readiness(True, "working"), 200),
        (Readiness(True, "standby: other leads"), 200),
        (Readiness(False, "the Lease has not been read yet"), 503),
    ],
)
async def test_readiness_says_who_works(readiness: Readiness, status: int) -> None:
    port = free_port()
    async with serve(port, Telemetry(), lambda: readiness):
        assert await read(port, "/readyz") == (status, f"{readiness.message}\n")
        assert await read(port, "/healthz") == (200, "ok\n")


async def test_the_page_has_what_was_counted() -> None:
    telemetry, port = Telemetry(), free_port()
    telemetry.leader.set(1)
    telemetry.count_request("GET", 200)
    telemetry.count_request("PATCH", 0)
    telemetry.count_decision("pressure", "maxModelLen")
    telemetry.note_scrape("ns", "gone", 10.0)
    telemetry.note_scrape("ns", "here", 20.0)
    telemetry.forget("ns", "gone")
    telemetry.forget("ns", "never-read")
    with telemetry.measure_pass():
        pass
    with pytest.raises(ValueError, match="x"), telemetry.measure_pass():
        raise ValueError("x")
    async with serve(port, telemetry, lambda: Readiness(True, "")):
        _, page = await read(port, "/metrics")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["plimsoll_operator_leader",] == 1
    assert samples["plimsoll_operator_api_requests_total", "200", "GET"] == 1
    assert samples["plimsoll_operator_api_requests_total", "0", "PATCH"] == 1
    assert samples["plimsoll_operator_decisions_total", "maxModelLen", "pressure"] == 1
    assert samples["plimsoll_operator_scrape_timestamp_seconds", "here", "ns"] == 20.0
    assert ("plimsoll_operator_scrape_timestamp_seconds", "gone", "ns") not in samples
    assert samples["plimsoll_operator_reconcile_seconds_count", "done"] == 1
    assert samples["plimsoll_operator_reconcile_seconds_count", "error"] == 1


def test_a_standing_is_shown_as_it_is_now_and_goes_with_its_object() -> None:
    telemetry = Telemetry()

    order = ("namespace", "name", "class", "type", "status", "reason")

    def shown() -> dict[tuple[str, ...], float]:
        return {
            (
                sample.name.removeprefix("plimsoll_operator_"),
                *(sample.labels[label] for label in order if label in sample.labels),
            ): sample.value
            for family in text_string_to_metric_families(telemetry.page().decode())
            for sample in family.samples
            if "name" in sample.labels
        }

    def active(status: str, reason: str) -> dict[str, str]:
        return {"type": "TuningActive", "status": status, "reason": reason, "message": "moves"}

    before = Standing((active("True", "Auto"),), {"CgroupOOM": 900.0}, 1, 4)
    telemetry.note_standing("ns", "m", before)
    telemetry.note_standing("ns", "unreadable", Standing((active("False", "InvalidSpec"),)))
    assert shown() == {
        ("condition", "ns", "m", "TuningActive", "True", "Auto"): 1,
        ("condition", "ns", "unreadable", "TuningActive", "False", "InvalidSpec"): 1,
        ("last_failure_timestamp_seconds", "ns", "m", "CgroupOOM"): 900.0,
        ("restarts_used", "ns", "m"): 1,
        ("restarts_allowed", "ns", "m"): 4,
    }
    telemetry.note_standing("ns", "m", Standing((active("False", "Stale"),), {}, 2, 4))
    telemetry.forget("ns", "unreadable")
    assert shown() == {
        ("condition", "ns", "m", "TuningActive", "False", "Stale"): 1,
        ("restarts_used", "ns", "m"): 2,
        ("restarts_allowed", "ns", "m"): 4,
    }
