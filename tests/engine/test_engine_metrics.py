"""The page has every name that dashboards and the operator expect, and never a stale gauge."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from plimsoll_engine.metrics import EngineMetrics, token_buckets
from plimsoll_engine.reports import FinishedRequest, FinishReason, StepStats
from support.engine_server import ApiServer, Pace, api_server, repeat

GAUGES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_cache_usage_factor",
    "plimsoll:device_memory_total_bytes",
    "plimsoll:device_memory_free_bytes",
    "plimsoll:device_memory_free_low_water_bytes",
    "plimsoll:kv_blocks_committed",
    "plimsoll:kv_blocks_usable",
    "plimsoll:kv_slots_unused",
    "plimsoll:max_model_len_admitted",
    "plimsoll:max_model_len_ceiling",
    "plimsoll:gpu_memory_utilization",
    "plimsoll:long_prompt_share",
    "plimsoll:limits_revision",
    "plimsoll:largest_prompt_admissible_tokens",
    "plimsoll:largest_prompt_startable_tokens",
    "plimsoll:step_heartbeat_age_seconds",
]
COUNTERS = [
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:generation_tokens_total",
    "plimsoll:allocation_failures_caught_total",
    "plimsoll:recomputed_tokens_total",
]
LABELLED = [
    *(f'vllm:num_requests_waiting_by_reason{{reason="{r}"}}' for r in ("capacity", "deferred")),
    *(
        f'vllm:request_success_total{{finished_reason="{reason}"}}'
        for reason in ("stop", "length", "abort", "error")
    ),
    *(
        f'plimsoll:memory_{kind}_bytes{{class="{each}"}}'
        for kind in ("planned", "actual")
        for each in ("weights", "activations", "graphs", "runtime", "kv_cache")
    ),
    *(
        f'plimsoll:requests_rejected_total{{reason="{reason}"}}'
        for reason in ("too_long", "over_admitted_length", "queue_full", "draining")
    ),
]
SECONDS = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 "
SECONDS += "960.0 1920.0 7680.0"
TOKEN_SECONDS = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 "
TOKEN_SECONDS += "40.0 80.0"
# For a ceiling of 2048 tokens.
TOKENS = "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 1000.0 2000.0"
HISTOGRAMS = {
    "vllm:iteration_tokens_total": "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 "
    "8192.0 16384.0",
    "vllm:time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 "
    "1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0",
    "vllm:inter_token_latency_seconds": TOKEN_SECONDS,
    "vllm:request_time_per_output_token_seconds": TOKEN_SECONDS,
    "vllm:e2e_request_latency_seconds": SECONDS,
    "vllm:request_queue_time_seconds": SECONDS,
    "vllm:request_inference_time_seconds": SECONDS,
    "vllm:request_prefill_time_seconds": SECONDS,
    "vllm:request_decode_time_seconds": SECONDS,
    "vllm:request_prompt_tokens": TOKENS,
    "vllm:request_generation_tokens": TOKENS,
    "vllm:request_max_num_generation_tokens": TOKENS,
    "vllm:request_params_max_tokens": TOKENS,
    "vllm:request_prefill_kv_computed_tokens": TOKENS,
    "vllm:request_params_n": "1.0 2.0 5.0 10.0 20.0",
}
PROCESS = ["process_start_time_seconds", "process_resident_memory_bytes"]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server(repeat("ab")) as running:
        running.complete(prompt="four", max_tokens=6)
        yield running


def test_every_name_is_there_from_the_start() -> None:
    with api_server() as fresh:
        values = fresh.metrics()
    for name in [*GAUGES, *COUNTERS, *LABELLED, *PROCESS]:
        assert name in values, name
    for name in HISTOGRAMS:
        assert values[f"{name}_count"] == 0, name


def test_everything_but_the_process_carries_the_model_and_the_engine(server: ApiServer) -> None:
    page = server.client.get("/metrics").text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                assert sample.labels["engine"] == "0"
                assert "model_name" not in sample.labels
            elif sample.name.startswith(("vllm:", "plimsoll:")):
                assert sample.labels["model_name"] == "m", sample
                assert sample.labels["engine"] == "0", sample


def test_histograms_have_the_buckets_of_vllm(server: ApiServer) -> None:
    families = {
        family.name: family
        for family in text_string_to_metric_families(server.client.get("/metrics").text)
    }
    for name, buckets in HISTOGRAMS.items():
        found = [s.labels["le"] for s in families[name].samples if s.name.endswith("_bucket")]
        assert " ".join(found) == f"{buckets} +Inf", name
        assert families[name].type == "histogram"
    for name in COUNTERS:
        assert families[name.removesuffix("_total")].type == "counter"


def test_a_request_is_counted_everywhere(server: ApiServer) -> None:
    values = server.metrics()
    assert values["vllm:prompt_tokens_total"] == 4
    assert values["vllm:generation_tokens_total"] == 6
    assert values["vllm:iteration_tokens_total_sum"] == 4 + 5
    assert values['vllm:request_success_total{finished_reason="length"}'] == 1
    assert values["vllm:time_to_first_token_seconds_count"] == 1
    assert values["vllm:inter_token_latency_seconds_count"] == 5
    for name in HISTOGRAMS:
        if name.startswith(("vllm:request_", "vllm:e2e")):
            assert values[f"{name}_count"] == 1, name
    assert values["vllm:request_params_max_tokens_sum"] == 6
    assert values["vllm:request_prompt_tokens_sum"] == 4


def test_cache_config_info_holds_the_cache_as_text(server: ApiServer) -> None:
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    (sample,) = next(f for f in families if f.name == "vllm:cache_config_info").samples
    assert sample.value == 1
    assert sample.labels["block_size"] == "16"
    assert sample.labels["num_gpu_blocks"] == "160"
    assert sample.labels["kv_cache_size_tokens"] == "2560"
    assert sample.labels["gpu_memory_utilization"] == "0.9"
    assert sample.labels["cache_dtype"] == "float32"


def test_the_process_is_measured(server: ApiServer) -> None:
    values = server.metrics()
    assert values["process_resident_memory_bytes"] > 10 << 20
    assert 0 < values["process_start_time_seconds"] <= time.time()


@pytest.mark.parametrize(
    ("longest", "buckets"),
    [(1, (1,)), (2, (1, 2)), (9, (1, 2, 5)), (10, (1, 2, 5, 10)), (999, (1, 2, 5, 10, 20, 50))],
)
def test_token_buckets_end_at_the_longest_request(longest: int, buckets: tuple[int, ...]) -> None:
    assert token_buckets(longest)[:6] == buckets
    assert max(token_buckets(longest)) <= longest


FINISHED = FinishedRequest(
    finish_reason=FinishReason.STOP,
    num_prompt_tokens=7,
    num_generation_tokens=5,
    max_tokens=9,
    num_prompt_computed_tokens=7,
    preemptions=1,
    arrival_time=100.0,
    queued_time=101.0,
    first_scheduled_time=103.0,
    last_scheduled_time=108.0,
    first_token_time=106.0,
    last_token_time=110.0,
    finished_time=110.5,
)


def sums(metrics: EngineMetrics, *names: str) -> list[float | None]:
    registry, labels = metrics.registry, {"model_name": "m", "engine": "0"}
    return [registry.get_sample_value(f"vllm:{name}_sum", labels) for name in names]


TIMES = (
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_inference_time_seconds",
    "request_decode_time_seconds",
    "request_time_per_output_token_seconds",
)


def test_the_intervals_of_a_request() -> None:
    """A preempted request's second wait counts as decoding, as in vLLM."""
    with api_server() as server:
        metrics = EngineMetrics("m")
        metrics.expose(server.core.snapshot)
        metrics.request_finished(FINISHED)
        assert sums(metrics, *TIMES) == [10.5, 2.0, 3.0, 7.0, 4.0, 1.0]


def test_a_request_that_never_ran_has_only_an_end() -> None:
    with api_server() as server:
        metrics = EngineMetrics("m")
        metrics.expose(server.core.snapshot)
        metrics.request_finished(
            replace(
                FINISHED,
                first_scheduled_time=None,
                last_scheduled_time=None,
                first_token_time=None,
                last_token_time=None,
            )
        )
        assert sums(metrics, *TIMES) == [10.5, 0, 0, 0, 0, 0]


def test_step_tokens_count_steps() -> None:
    metrics = EngineMetrics("m")
    metrics.step_done(
        StepStats(
            num_tokens=40, prompt_tokens=30, generation_tokens=9, preemptions=0, recomputed_tokens=1
        )
    )
    assert sums(metrics, "iteration_tokens_total") == [40]


def test_b06_gauges_do_not_freeze_when_all_requests_are_cancelled_at_once() -> None:
    pace = Pace(0.002)
    with api_server(repeat("ab"), before_step=pace, num_blocks=160) as server:
        idle = server.metrics()["vllm:kv_cache_usage_perc"]
        body = {
            "model": "m",
            "prompt": "x",
            "max_tokens": 2000,
            "ignore_eos": True,
            "stream": True,
        }
        with ExitStack() as sockets:
            for _ in range(8):
                sockets.enter_context(server.client.stream("POST", "/v1/completions", json=body))
            deadline = time.monotonic() + 30
            while server.metrics()["vllm:kv_cache_usage_perc"] <= 0.5:
                assert time.monotonic() < deadline
            assert server.metrics()["vllm:num_requests_running"] == 8
        closed = time.monotonic()

        def settled() -> bool:
            values = server.metrics()
            return (
                values["vllm:num_requests_running"] == 0
                and values["vllm:num_requests_waiting"] == 0
                and values["vllm:kv_cache_usage_perc"] == idle
            )

        while not settled():
            assert time.monotonic() < closed + 2
        assert server.core.snapshot().used_blocks == 0
        assert server.client.get("/load").json() == {"server_load": 0}
        assert server.complete(prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2
