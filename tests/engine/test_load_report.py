"""The load report (ORCA) in the head of answers: vLLM's header, names and forms."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from plimsoll_engine.executor import StepBatch
from support.engine_server import ApiServer, api_server, repeat

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}
# Held by a request: one of 160 blocks, or two with a chat's template.
BLOCKS = (1 / 160, 2 / 160)


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server(repeat("ab"), enable_prefix_caching=False) as running:
        yield running


def ask(server: ApiServer, form: str, path: str = "/v1/completions", **body: Any) -> str | None:
    headers = {"Endpoint-Load-Metrics-Format": form}
    response = server.client.post(path, json=BODIES[path] | body, headers=headers)
    report: str | None = response.headers.get("endpoint-load-metrics")
    return report


@pytest.mark.parametrize("path", BODIES)
def test_text_and_json(server: ApiServer, path: str) -> None:
    """The answer may be ahead of the snapshot in which its block is free again."""
    for form in ("text", "TEXT"):
        report = ask(server, form, path) or ""
        named = dict(each.split("=") for each in report.removeprefix("TEXT ").split(", "))
        assert report.startswith("TEXT ")
        assert set(named) == {
            "named_metrics.kv_cache_usage_perc",
            "named_metrics.num_requests_waiting",
        }
        assert float(named["named_metrics.kv_cache_usage_perc"]) in (0, *BLOCKS)
        assert float(named["named_metrics.num_requests_waiting"]) == 0
    kind, _, document = (ask(server, "json", path) or "").partition(" ")
    assert kind == "JSON"
    (metrics,) = json.loads(document).values()
    assert metrics["num_requests_waiting"] == 0
    assert metrics["kv_cache_usage_perc"] in (0, *BLOCKS)


@pytest.mark.parametrize("form", ["", "bin", "text, json", "\xe9"])
def test_another_form_gets_no_report_and_no_error(server: ApiServer, form: str) -> None:
    headers = {b"endpoint-load-metrics-format": form.encode("latin-1")}
    response = server.client.post(
        "/v1/completions", json=BODIES["/v1/completions"], headers=headers
    )
    assert response.status_code == 200
    assert "endpoint-load-metrics" not in response.headers


def test_only_answers_that_generate_have_one(server: ApiServer) -> None:
    assert ask(server, "text", n=0) is None
    headers = {"endpoint-load-metrics-format": "text"}
    for path in ("/v1/models", "/health", "/metrics"):
        assert "endpoint-load-metrics" not in server.client.get(path, headers=headers).headers
    unasked = server.post("/v1/completions", **BODIES["/v1/completions"])
    assert "endpoint-load-metrics" not in unasked.headers


def test_a_stream_tells_the_load_that_it_begins_in() -> None:
    decoding, gate = threading.Event(), threading.Event()

    def before_step(batch: StepBatch) -> None:
        if batch.chunks[0].start > 0:
            decoding.set()
            gate.wait(20)

    with (
        api_server(repeat("a"), before_step=before_step, max_num_seqs=1) as server,
        ThreadPoolExecutor(1) as clients,
    ):
        running = clients.submit(server.complete, prompt="a" * 500, max_tokens=2)
        try:
            assert decoding.wait(10)
            headers = {"endpoint-load-metrics-format": "json"}
            body = BODIES["/v1/completions"] | {"stream": True}
            with server.client.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as response:
                report = response.headers["endpoint-load-metrics"]
                gate.set()
        finally:
            gate.set()
        assert running.result(20)
    metrics = json.loads(report.removeprefix("JSON "))["named_metrics"]
    # 32 of 160 blocks are held by the one that runs; this one waits.
    assert metrics == {"kv_cache_usage_perc": 0.2, "num_requests_waiting": 1.0}
