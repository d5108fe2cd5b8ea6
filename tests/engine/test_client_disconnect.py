"""A client that goes away costs nothing more, whatever state its request is in."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from plimsoll_engine.executor import StepBatch
from plimsoll_engine.server.protocol import Body
from plimsoll_engine.server.service import Service
from support.engine_server import ApiServer, Pace, api_server, repeat

LONG = {"model": "m", "prompt": "x", "max_tokens": 2000, "ignore_eos": True}


def send(server: ApiServer, body: dict[str, Any]) -> socket.socket:
    """A request on a socket of its own, which the caller may drop at any time."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    data = json.dumps(body).encode()
    connection = socket.create_connection((address.hostname, address.port or 0))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def is_empty(server: ApiServer) -> bool:
    now = server.core.snapshot()
    return now.running == now.waiting == now.used_blocks == 0 and server.service.load == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_running_request_ends_with_its_client(stream: bool) -> None:
    with api_server(repeat("ab"), before_step=Pace(0.002)) as server:
        connection = send(server, LONG | {"stream": stream, "n": 2})
        wait_until(lambda: server.core.snapshot().running == 2, "running")
        connection.close()
        wait_until(lambda: is_empty(server), "aborted")
        assert len(server.executor.batches) < 1900
        aborted = 'vllm:request_success_total{finished_reason="abort"}'
        assert server.metrics()[aborted] == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_waiting_request_ends_with_its_client(stream: bool) -> None:
    with api_server(repeat("ab"), before_step=Pace(0.002), max_num_seqs=1) as server:
        first = send(server, LONG)
        wait_until(lambda: server.core.snapshot().running == 1, "running")
        second = send(server, LONG | {"stream": stream})
        wait_until(lambda: server.core.snapshot().waiting == 1, "waiting")
        second.close()
        wait_until(lambda: server.core.snapshot().waiting == 0, "left the queue")
        assert server.core.snapshot().running == 1
        first.close()
        wait_until(lambda: is_empty(server), "aborted")


def test_a_client_that_leaves_during_a_long_step_is_forgotten_after_it() -> None:
    entered, gate = threading.Event(), threading.Event()

    def before_step(batch: StepBatch) -> None:
        entered.set()
        gate.wait(20)

    with api_server(repeat("ab"), before_step=before_step) as server:
        connection = send(server, LONG)
        assert entered.wait(10)
        connection.close()
        wait_until(lambda: server.service.load == 0, "the server lets go at once")
        gate.set()
        wait_until(lambda: is_empty(server), "the core lets go after the step")


PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_before_its_body_is_complete_is_harmless(
    path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, left = threading.Event(), threading.Event()
    read = Service.read

    async def note(service: Service, http: HttpRequest, kind: type[Body]) -> Body:
        begun.set()
        try:
            return await read(service, http, kind)
        except ClientDisconnect:
            left.set()
            raise

    monkeypatch.setattr(Service, "read", note)
    with api_server() as server:
        address = urlsplit(server.url)
        connection = socket.create_connection((str(address.hostname), address.port or 0))
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: m\r\nContent-Length: 99\r\n\r\n{{".encode()
        )
        assert begun.wait(10)
        connection.close()
        assert left.wait(10)
        assert server.complete(prompt="a")["choices"]
        wait_until(lambda: is_empty(server), "nothing is left")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_health_and_metrics_answer_while_a_step_takes_long() -> None:
    entered, gate = threading.Event(), threading.Event()

    def before_step(batch: StepBatch) -> None:
        entered.set()
        gate.wait(20)

    with api_server(repeat("ab"), before_step=before_step) as server:
        connection = send(server, LONG)
        assert entered.wait(10)
        for path in ("/health", "/metrics", "/v1/models"):
            asked = time.monotonic()
            assert server.client.get(path).status_code == 200
            # Far less than the step would take.
            assert time.monotonic() - asked < 10
        connection.close()
        gate.set()


def test_a_step_that_hangs_is_unhealthy_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plimsoll_engine.server.app.STALE_HEARTBEAT_SECONDS", 0.8)
    entered, gate = threading.Event(), threading.Event()

    def before_step(batch: StepBatch) -> None:
        entered.set()
        gate.wait(30)

    def health() -> int:
        return server.client.get("/health").status_code

    with api_server(repeat("ab"), before_step=before_step) as server:
        # Without work there is no step to wait for; the loop itself goes round.
        assert health() == 200
        connection = send(server, LONG)
        assert entered.wait(10)
        wait_until(lambda: health() == 503, "the engine hangs and looks well")
        gate.set()
        wait_until(lambda: health() == 200, "the engine goes on and looks dead")
        connection.close()
