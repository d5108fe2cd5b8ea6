"""EngineControl over a real gRPC channel: who may call, and what limits and reports say."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from plimsoll_engine.config import ConfigError
from plimsoll_engine.control import server as control_server
from plimsoll_engine.control.credentials import ControlCredentials
from plimsoll_engine.control.reports import EngineIdentity
from plimsoll_engine.control.server import (
    MAX_DRAINS,
    MAX_REFLECTIONS,
    MAX_WATCHERS,
    SERVICE_NAME,
    WORKERS,
    ControlServer,
    Credentials,
)
from plimsoll_engine.executor import StepBatch
from plimsoll_wire import engine_control_pb2 as wire
from plimsoll_wire import engine_control_pb2_grpc as wire_grpc
from support.certificates import make_pair
from support.engine_server import ApiServer, api_server, repeat

IDENTITY = EngineIdentity("0.1.0", "m", "cpu", 1)
TOKEN = [("authorization", "Bearer open-sesame")]
TIMEOUT = 20


@contextmanager
def control_of(
    server: ApiServer, credentials: Credentials | None = None
) -> Iterator[ControlServer]:
    control = ControlServer(server.core, IDENTITY, port=0, credentials=credentials)
    control.start()
    try:
        yield control
    finally:
        control.stop()


def stub_on(channel: grpc.Channel, kind: Any = wire_grpc.EngineControlStub) -> Any:
    """Generated stubs have no types of their own."""
    return kind(channel)


@contextmanager
def stub_of(control: ControlServer) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{control.port}") as channel:
        yield stub_on(channel)


def test_the_report_tells_plan_use_and_limits() -> None:
    with (
        api_server(max_num_seqs=32) as server,
        control_of(server) as control,
        stub_of(control) as stub,
    ):
        report = stub.GetMemoryReport(wire.GetMemoryReportRequest(), timeout=TIMEOUT)
    assert (report.model, report.device, report.dtype) == ("m", "cpu", "float32")
    assert (report.engine_version, report.tensor_parallel_size) == ("0.1.0", 1)
    names = [each.name for each in report.classes]
    assert names == ["weights", "activations", "graphs", "runtime", "kv_cache"]
    # Nothing is recorded on the CPU.
    assert [each.name for each in report.classes if each.planned_bytes == 0] == ["graphs"]
    assert report.device_total_bytes > report.device_free_bytes > 0
    assert (report.usable_blocks, report.used_blocks, report.block_size) == (160, 0, 16)
    assert (report.max_model_len_ceiling, report.model_max_len) == (2048, 8192)
    assert report.largest_prompt_admissible == 2047
    assert report.limits.max_model_len == 2048
    assert report.limits.max_num_seqs == 32
    assert report.limits.gpu_memory_utilization == pytest.approx(0.9)
    assert (report.limits_revision, report.limits_outcome) == (0, wire.APPLIED)


def set_limits(stub: Any, revision: int, limits: wire.Limits) -> wire.SetLimitsResponse:
    request = wire.SetLimitsRequest(revision=revision, limits=limits)
    response: wire.SetLimitsResponse = stub.SetLimits(request, timeout=TIMEOUT)
    return response


def test_a_lowered_length_answers_429_and_keeps_what_was_accepted() -> None:
    begun, gate = threading.Event(), threading.Event()

    def before_step(batch: StepBatch) -> None:
        # Decoding: the limits below move between two such steps.
        if batch.chunks[0].start == 20:
            begun.set()
            gate.wait(TIMEOUT)

    body = {"model": "m", "prompt": "x" * 20, "max_tokens": 100, "stream": True}
    with (
        api_server(repeat("ab"), before_step=before_step) as server,
        control_of(server) as control,
        stub_of(control) as stub,
        server.client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        assert begun.wait(TIMEOUT)
        request = wire.SetLimitsRequest(revision=7, limits=wire.Limits(max_model_len=100))
        pending = stub.SetLimits.future(request, timeout=TIMEOUT)
        gate.set()
        response = pending.result()
        assert (response.outcome, response.revision) == (wire.APPLIED, 7)
        assert response.effective.max_model_len == 100
        assert response.effective.gpu_memory_utilization == pytest.approx(0.9)

        refused = server.post("/v1/completions", model="m", prompt="x" * 20, max_tokens=100)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        # The ceiling, and what is refused for ever, stay.
        assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == 2048
        too_long = server.post("/v1/completions", model="m", prompt="x", max_tokens=3000)
        assert too_long.status_code == 400

        stream.read()
        assert '"finish_reason":"length"' in stream.text
        values = server.metrics()
        assert values["plimsoll:max_model_len_admitted"] == 100
        assert values["plimsoll:limits_revision"] == 7
        rejected = 'plimsoll:requests_rejected_total{reason="over_admitted_length"}'
        assert values[rejected] == 1


def test_a_chat_without_max_tokens_fits_into_the_admitted_length() -> None:
    with api_server(repeat("ab")) as server, control_of(server) as control:
        with stub_of(control) as stub:
            set_limits(stub, 1, wire.Limits(max_model_len=64))
        answer = server.post(
            "/v1/chat/completions", model="m", messages=[{"role": "u", "content": "x"}]
        )
        assert answer.json()["usage"]["total_tokens"] == 64


def test_bad_limits_are_rejected_with_a_reason() -> None:
    with api_server() as server, control_of(server) as control, stub_of(control) as stub:
        response = set_limits(stub, 1, wire.Limits(max_model_len=4096))
        assert response.outcome == wire.REJECTED
        assert "4096" in response.reason
        assert "2048" in response.reason
        assert response.effective.max_model_len == 2048
        assert set_limits(stub, 5, wire.Limits(max_num_seqs=8)).outcome == wire.APPLIED
        stale = set_limits(stub, 4, wire.Limits(max_num_seqs=4))
        assert (stale.outcome, stale.revision) == (wire.REJECTED, 5)
        assert stale.effective.max_num_seqs == 8


def test_watch_tells_the_state_at_once_and_after_a_change() -> None:
    with api_server() as server, control_of(server) as control, stub_of(control) as stub:
        reports = stub.WatchState(wire.WatchStateRequest(), timeout=TIMEOUT)
        assert next(reports).limits.max_model_len == 2048
        set_limits(stub, 1, wire.Limits(max_model_len=512))
        assert next(report.limits.max_model_len for report in reports) == 512
        reports.cancel()


def test_calls_that_last_leave_threads_for_limits_and_reports() -> None:
    """However many clients watch, drain or hold a reflection stream open."""
    stop_asking = threading.Event()

    def questions() -> Iterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        stop_asking.wait(TIMEOUT)

    body = {"model": "m", "prompt": "x", "max_tokens": 1000, "stream": True}
    gate = threading.Event()

    def hold(batch: StepBatch) -> None:
        gate.wait(TIMEOUT)

    with (
        api_server(repeat("ab"), before_step=hold) as server,
        control_of(server) as control,
        stub_of(control) as stub,
        grpc.insecure_channel(f"127.0.0.1:{control.port}") as other,
        server.client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        watches = [stub.WatchState(wire.WatchStateRequest()) for _ in range(WORKERS + 4)]
        codes = [code_of_first(watch) for watch in watches]
        assert codes.count(None) == MAX_WATCHERS
        assert set(codes) == {None, grpc.StatusCode.RESOURCE_EXHAUSTED}
        long = wire.DrainRequest(timeout_seconds=TIMEOUT)
        drains = [stub.Drain.future(long) for _ in range(WORKERS)]
        reflected = stub_on(other, reflection_pb2_grpc.ServerReflectionStub)
        reflections = [reflected.ServerReflectionInfo(questions()) for _ in range(WORKERS)]
        codes = [code_of_first(each) for each in reflections]
        assert codes.count(None) == MAX_REFLECTIONS

        assert stub.GetMemoryReport(wire.GetMemoryReportRequest(), timeout=TIMEOUT).model == "m"
        # A place that is given up can be taken again.
        for watch in watches:
            watch.cancel()
        for _ in range(100):
            again = stub.WatchState(wire.WatchStateRequest(), timeout=TIMEOUT)
            if code_of_first(again) is None:
                break
        else:
            raise AssertionError("no place has become free")
        again.cancel()
        stop_asking.set()
        gate.set()
        stream.read()
        refused = [each for each in drains if each.exception() is not None]
        assert len(refused) == WORKERS - MAX_DRAINS
        assert "at most that many" in refused[0].exception().details()


def code_of_first(stream: Any) -> grpc.StatusCode | None:
    """None: the stream has answered."""
    try:
        next(stream)
    except grpc.RpcError:
        code: grpc.StatusCode = stream.code()
        return code
    return None


class Relay:
    """A connection through which nothing passes any more once it is cut, unknown to both sides."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._cut = threading.Event()
        self._target = port
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()

    def _accept(self) -> None:
        with self._listener:
            client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._target))
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with source:
            while data := source.recv(1 << 16):
                if not self._cut.is_set():
                    sink.sendall(data)


def test_a_client_that_vanished_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "MAX_WATCHERS", 1)
    monkeypatch.setattr(control_server, "KEEPALIVE_SECONDS", 1)
    monkeypatch.setattr(control_server, "KEEPALIVE_ANSWER_SECONDS", 1)
    with api_server() as server, control_of(server) as control, stub_of(control) as stub:
        relay = Relay(control.port)
        with grpc.insecure_channel(f"127.0.0.1:{relay.port}") as channel:
            assert code_of_first(stub_on(channel).WatchState(wire.WatchStateRequest())) is None
            relay.cut()
            deadline = time.monotonic() + TIMEOUT
            while code_of_first(watch := stub.WatchState(wire.WatchStateRequest())) is not None:
                assert time.monotonic() < deadline, "the vanished client still holds its place"
                time.sleep(0.1)
            watch.cancel()


def test_drain_refuses_new_requests_and_tells_what_is_left() -> None:
    with api_server() as server, control_of(server) as control, stub_of(control) as stub:
        with pytest.raises(grpc.RpcError, match="timeout_seconds: -1"):
            stub.Drain(wire.DrainRequest(timeout_seconds=-1), timeout=TIMEOUT)
        response = stub.Drain(wire.DrainRequest(timeout_seconds=5), timeout=TIMEOUT)
        assert (response.drained, response.running, response.waiting) == (True, 0, 0)
        refused = server.post("/v1/completions", model="m", prompt="x")
        assert refused.status_code == 503


def test_tls_and_the_token_guard_everything_but_health() -> None:
    certificate = make_pair()
    credentials = ControlCredentials(certificate.certificate, certificate.key, "open-sesame")
    trusted = grpc.ssl_channel_credentials(certificate.certificate)
    with (
        api_server() as server,
        control_of(server, lambda: credentials) as control,
        grpc.secure_channel(f"127.0.0.1:{control.port}", trusted) as channel,
    ):
        stub = stub_on(channel)
        ask = wire.GetMemoryReportRequest()
        for metadata in ([], [("authorization", "Bearer wrong")]):
            with pytest.raises(grpc.RpcError) as refused:
                stub.GetMemoryReport(ask, timeout=TIMEOUT, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            # A stream is refused as well.
            with pytest.raises(grpc.RpcError) as refused:
                next(stub.WatchState(wire.WatchStateRequest(), metadata=metadata, timeout=TIMEOUT))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert stub.GetMemoryReport(ask, timeout=TIMEOUT, metadata=TOKEN).model == "m"

        health = stub_on(channel, health_pb2_grpc.HealthStub)
        for service in ("", SERVICE_NAME):
            check = health_pb2.HealthCheckRequest(service=service)
            status = health.Check(check, timeout=TIMEOUT).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        control.set_serving(False)
        status = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING

        with grpc.insecure_channel(f"127.0.0.1:{control.port}") as plain:
            with pytest.raises(grpc.RpcError) as refused:
                stub_on(plain).GetMemoryReport(ask, timeout=TIMEOUT)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_reflection_lists_the_service() -> None:
    with (
        api_server() as server,
        control_of(server) as control,
        grpc.insecure_channel(f"127.0.0.1:{control.port}") as channel,
    ):
        stub = stub_on(channel, reflection_pb2_grpc.ServerReflectionStub)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([question]), timeout=TIMEOUT)
    names = [each.name for each in answer.list_services_response.service]
    assert SERVICE_NAME == "plimsoll.v1.EngineControl"
    assert SERVICE_NAME in names


def test_without_credentials_only_the_loopback_address_listens() -> None:
    with api_server() as server, control_of(server) as control, socket.socket() as probe:
        # Another address of this machine is free: nobody listens on all of them.
        probe.bind(("127.0.0.2", control.port))


def test_a_port_in_use_is_a_clear_error() -> None:
    with (
        api_server() as server,
        control_of(server) as control,
        pytest.raises(ConfigError, match=f"--control-port.*{control.port}"),
    ):
        ControlServer(server.core, IDENTITY, port=control.port, credentials=None)
