"""The gate's EngineControl, its metrics page, settings and what it reads of an upstream's pages."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from plimsoll_engine.config import ConfigError
from plimsoll_engine.control.server import ControlChannel
from plimsoll_engine.gate.config import GateConfig, parse_args
from plimsoll_engine.gate.control import ControlledGate
from plimsoll_engine.gate.process import read_limits
from plimsoll_engine.gate.upstream_state import UnreadableAnswer, read_metrics, read_models
from plimsoll_engine.limits import Limits
from plimsoll_wire import engine_control_pb2 as wire
from plimsoll_wire import engine_control_pb2_grpc as wire_grpc
from support.gate_harness import PAGE, SECONDS, Harness, free_port, open_gate, until


@asynccontextmanager
async def controlled(harness: Harness) -> AsyncIterator[Any]:
    """A client's stub on a real channel."""
    target = ControlledGate(harness.gate, asyncio.get_running_loop())
    control = ControlChannel(target, port=0, credentials=None)
    control.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{control.port}") as channel:
            yield wire_grpc.EngineControlStub(channel)  # type: ignore[no-untyped-call]
    finally:
        await asyncio.to_thread(control.stop)


def limits_request(revision: int, **limits: Any) -> wire.SetLimitsRequest:
    return wire.SetLimitsRequest(revision=revision, limits=wire.Limits(**limits))


async def test_the_report_has_what_the_upstream_tells_and_nothing_else() -> None:
    async with open_gate() as harness, controlled(harness) as stub:
        report = await stub.GetMemoryReport(wire.GetMemoryReportRequest(), timeout=SECONDS)
    assert (report.model, report.engine_version) == ("m", "0.27.1")
    assert (report.block_size, report.usable_blocks, report.used_blocks) == (16, 100, 25)
    assert (report.running, report.waiting, report.preemptions) == (2, 3, 7)
    assert (report.max_model_len_ceiling, report.largest_prompt_admissible) == (1000, 999)
    assert report.started_at == 1.7e9
    assert report.limits.gpu_memory_utilization == 0.9
    assert report.limits.max_model_len == 1000
    unknown = (
        "device_total_bytes",
        "device_free_bytes",
        "bytes_per_block",
        "model_max_len",
        "tensor_parallel_size",
        "dtype",
        "allocation_failures_caught",
        "step_heartbeat_age_seconds",
    )
    assert [name for name in unknown if report.HasField(name)] == []
    assert not report.limits.HasField("max_num_batched_tokens")


async def test_an_upstream_that_tells_nothing_leaves_the_report_empty_not_zero() -> None:
    async with (
        open_gate(at=f"http://127.0.0.1:{free_port()}") as harness,
        controlled(harness) as stub,
    ):
        report = await stub.GetMemoryReport(wire.GetMemoryReportRequest(), timeout=SECONDS)
    given = {field.name for field, _ in report.ListFields()}
    assert given == {"limits", "limits_revision", "limits_outcome"}
    assert not report.limits.HasField("max_model_len")


async def test_limits_are_moved_by_revision_within_their_bounds() -> None:
    async with open_gate(min_model_len=100) as harness, controlled(harness) as stub:

        async def move(revision: int, **limits: Any) -> wire.SetLimitsResponse:
            request = limits_request(revision, **limits)
            return await stub.SetLimits(request, timeout=SECONDS)  # type: ignore[no-any-return]

        answer = await move(3, max_model_len=400, long_prompt_tokens=50, long_prompt_share=0.5)
        assert (answer.outcome, answer.revision) == (wire.APPLIED, 3)
        assert answer.effective.max_model_len == 400
        assert (
            await move(3, max_model_len=400, long_prompt_tokens=50, long_prompt_share=0.5)
        ) == answer
        for revision, asked, told in (
            (3, {"max_model_len": 500}, "revision: 3 is in force"),
            (2, {"max_model_len": 500}, "revision: 2 is stale"),
            (
                4,
                {"max_model_len": 99},
                "max_model_len: 99 is not allowed; expected 100 (the floor)",
            ),
            (4, {"max_model_len": 1001}, "max_model_len: 1001 is not allowed; expected 1 to 1000"),
            (4, {"max_num_seqs": 257}, "max_num_seqs: 257 is not allowed; expected 1 to 256"),
            (4, {"long_prompt_share": 0.0}, "long_prompt_share"),
            (4, {"gpu_memory_utilization": 0.8}, "vLLM moves it by a restart"),
            (4, {"max_num_batched_tokens": 8}, "vLLM moves it by a restart"),
            (4, {"watermark": 0.1}, "vLLM moves it by a restart"),
        ):
            answer = await move(revision, **asked)
            assert (answer.outcome, answer.revision) == (wire.REJECTED, 3), asked
            assert told in answer.reason
        answer = await move(4, max_num_seqs=2, gpu_memory_utilization=0.9)
        assert (answer.outcome, answer.effective.max_num_seqs) == (wire.APPLIED, 2)
        assert harness.gate.limits.current.max_model_len == 400


async def test_a_drain_over_the_channel_counts_what_is_left() -> None:
    async with open_gate(max_num_seqs=1) as harness, controlled(harness) as stub:
        tasks = [harness.complete([1]), harness.complete([2])]
        await until(lambda: harness.gate.waiting == 1)
        answer = await stub.Drain(wire.DrainRequest(timeout_seconds=0), timeout=SECONDS)
        assert (answer.drained, answer.running, answer.waiting) == (False, 1, 1)
        for _ in tasks:
            (await harness.next()).answer_json()
        await asyncio.gather(*tasks)
        answer = await stub.Drain(wire.DrainRequest(timeout_seconds=5), timeout=SECONDS)
        assert answer.drained


async def test_the_metrics_page_is_the_upstreams_with_the_gates_own_at_its_end() -> None:
    async with open_gate(max_num_seqs=1, long_prompt_tokens=2) as harness:
        harness.gate.set_limits(9, Limits(max_model_len=500))
        assert (await harness.complete([1] * 501, 10))[0] == 429
        tasks = [harness.complete([1, 2, 3]), harness.complete([2])]
        await until(lambda: harness.gate.waiting == 1)
        async with harness.client.get(harness.url + "/metrics") as answer:
            page = await answer.text()
        for _ in tasks:
            (await harness.next()).answer_json()
        await asyncio.gather(*tasks)
    assert page.startswith(PAGE)
    labels = {"engine": "0", "model_name": "m"}
    samples = {
        sample.name + sample.labels.get("reason", ""): sample
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("plimsoll:")
    }
    for name, value in {
        "upstream_up": 1,
        "max_model_len_admitted": 500,
        "max_model_len_ceiling": 1000,
        "limits_revision": 9,
        "gate_requests_running": 1,
        "gate_requests_waiting": 1,
        "gate_long_requests_running": 1,
    }.items():
        assert samples[f"plimsoll:{name}"].value == value, name
        assert samples[f"plimsoll:{name}"].labels == labels
    assert samples["plimsoll:requests_rejected_totalover_admitted_length"].value == 1
    assert samples["plimsoll:requests_rejected_totalqueue_full"].value == 0


CONFIG = 'vllm:cache_config_info{{block_size="16",engine="{0}",num_gpu_blocks="{1}"}} 1\n'


@pytest.mark.parametrize(
    ("page", "blocks", "used"),
    [
        (CONFIG.format(0, 100) + 'vllm:gpu_cache_usage_perc{engine="0"} 0.5\n', 100, 50),
        (CONFIG.format(0, 100), 100, None),
        (CONFIG.format(0, 100) + 'vllm:kv_cache_usage_perc{engine="0"} NaN\n', 100, None),
        ('vllm:kv_cache_usage_perc{engine="0"} 0.5\n', None, None),
        (CONFIG.format(0, "None") + 'vllm:kv_cache_usage_perc{engine="0"} 0.5\n', None, None),
        (
            CONFIG.format(0, 100)
            + CONFIG.format(1, 50)
            + 'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 1\n',
            150,
            100,
        ),
        (CONFIG.format(0, 100) + CONFIG.format(1, "None"), None, None),
        ("", None, None),
    ],
)
def test_blocks_are_read_from_old_and_new_pages_or_unknown(
    page: str, blocks: int | None, used: int | None
) -> None:
    metrics = read_metrics(page)
    assert (metrics.num_blocks, metrics.used_blocks) == (blocks, used)
    assert metrics.preemptions is metrics.started_at is metrics.running is None


def test_pages_that_are_none_are_unreadable() -> None:
    with pytest.raises(UnreadableAnswer, match="/metrics"):
        read_metrics('vllm:num_requests_running{engine="0"} x\n')
    for body in (b"", b"[]", b"{}", b'{"data": []}', b'{"data": [{"id": "m"}]}', b"[" * 100_000):
        with pytest.raises(UnreadableAnswer, match="/v1/models"):
            read_models(body)
    adapters = {"data": [{"id": "m", "max_model_len": 8}, {"id": "a", "max_model_len": None}]}
    assert read_models(json.dumps(adapters).encode()).names == ("m", "a")


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ("", "--upstream"),
        ("--upstream vllm:8000", "--upstream"),
        ("--upstream http://a/?x", "--upstream"),
        ("--upstream http://a:99999", "--upstream"),
        ("--upstream http://a --port 0", "--port"),
        ("--upstream http://a --max-model-len auto", "--max-model-len"),
        ("--upstream http://a --max-model-len 9 --min-model-len 10", "--min-model-len"),
        ("--upstream http://a --long-prompt-share 0", "--long-prompt-share"),
        ("--upstream http://a --shutdown-timeout nan", "--shutdown-timeout"),
        ("--upstream http://a --port 9 --control-port 9", "--control-port"),
        ("--upstream http://a --what", "arguments"),
    ],
)
def test_a_bad_setting_is_named(flags: str, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_args(flags.split(), {})
    assert error.value.field == field


def test_settings_are_read_as_the_engines(tmp_path: Path) -> None:
    left = tmp_path / "limits.json"
    left.write_text(
        '{"revision": 5, "limits": {"maxModelLen": 700, "maxNumSeqs": 999, "watermark": 0.1}}'
    )
    flags = f"--upstream http://a:1/ --max-model-len 8K --limits-file {left}"
    config = parse_args(flags.split(), {"PLIMSOLL_API_KEY": "secret"})
    assert (config.upstream, config.max_model_len) == ("http://a:1", 8192)
    assert "secret" not in repr(config)
    limits = read_limits(config)
    assert limits.revision == 5
    assert limits.current == Limits(max_model_len=700, max_num_seqs=256, long_prompt_share=1.0)
    left.write_text("{")
    with pytest.raises(ConfigError, match="--limits-file"):
        read_limits(config)
    assert read_limits(GateConfig("http://a")).revision == 0


def test_the_process_serves_and_ends_at_a_signal() -> None:
    port = free_port()
    command = [sys.executable, "-m", "plimsoll_engine.gate", "--upstream", "http://127.0.0.1:1"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--control-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as gate:
        assert gate.stderr is not None
        for line in gate.stderr:
            if b"is open" in line:
                break
        base = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{base}/gate/health", timeout=SECONDS) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{base}/health", timeout=SECONDS)
        assert error.value.code == 503
        error.value.close()
        gate.send_signal(signal.SIGTERM)
        gate.stderr.read()
        assert gate.wait(SECONDS) == 0


def test_a_port_in_use_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "plimsoll_engine.gate", "--upstream", "http://127.0.0.1:1"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    assert ended.returncode == 2
    assert json.loads(ended.stderr)["class"] == "InvalidConfiguration"
