"""One engine process from outside: when it listens, how it ends, and what it leaves to read."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from plimsoll_engine.process import SHUTDOWN_SECONDS
from support.tiny_model import MAX_POSITIONS, write_tiny_model

TESTS = Path(__file__).parents[1]
REAL = ["plimsoll_engine"]
START_SECONDS = 90


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def scripted(scenario: str) -> list[str]:
    return ["support.scripted_engine", scenario, "--model", "m"]


@dataclass
class EngineProcess:
    process: subprocess.Popen[str]
    client: httpx.Client
    termination_log: Path

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.read_error()
            try:
                # Whoever accepts a connection can serve: there is no half-ready time.
                assert self.client.get("/health").status_code == 200
                return
            except httpx.ConnectError:
                time.sleep(0.05)
        raise AssertionError("not ready in time")

    def read_error(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self, seconds: float = START_SECONDS) -> tuple[int, str]:
        """Exit status and what is on stderr."""
        _, error = self.process.communicate(timeout=seconds)
        return self.process.returncode, error

    def termination(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.termination_log.read_text())
        return document


@contextmanager
def engine_process(tmp_path: Path, module: Sequence[str], *flags: str) -> Iterator[EngineProcess]:
    log = tmp_path / "termination-log"
    log.touch()
    port = free_port()
    network = ["--host", "127.0.0.1", "--port", str(port), "--control-port", "0"]
    environ = {
        "TERMINATION_LOG_PATH": str(log),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(TESTS),
        "PYTHONSAFEPATH": "1",
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
    }
    with (
        subprocess.Popen(
            [sys.executable, "-m", *module, *network, *flags],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        try:
            yield EngineProcess(process, client, log)
        finally:
            process.kill()


class Stream:
    """A streamed completion that is read by a thread of its own."""

    def __init__(self, engine: EngineProcess, max_tokens: int) -> None:
        self.lines: list[str] = []
        self._begun = threading.Event()
        self._body = {
            "model": "m",
            "prompt": "x",
            "stream": True,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        self._engine = engine
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(30)

    def _read(self) -> None:
        with self._engine.client.stream("POST", "/v1/completions", json=self._body) as response:
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
                    self._begun.set()

    def end(self) -> list[dict[str, Any]]:
        self._thread.join(60)
        assert self.lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in self.lines]


def test_sigterm_finishes_what_is_in_flight_and_exits_0(tmp_path: Path) -> None:
    with engine_process(tmp_path, scripted("serve"), "--shutdown-timeout", "120") as engine:
        engine.wait_until_healthy()
        stream = Stream(engine, max_tokens=400)
        engine.process.send_signal(signal.SIGTERM)
        while engine.client.get("/health").status_code == 200:
            time.sleep(0.01)
        refused = engine.client.post("/v1/completions", json={"model": "m", "prompt": "x"})
        assert refused.status_code == 503
        events = stream.end()
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == "abcdefgh" * 50
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        status, error = engine.end()
        assert status == 0
        assert "all requests finished" in error
        assert engine.termination_log.read_text() == ""


def test_what_does_not_finish_in_time_is_aborted(tmp_path: Path) -> None:
    flags = ("--shutdown-timeout", "0.2")
    with engine_process(tmp_path, scripted("serve"), *flags) as engine:
        engine.wait_until_healthy()
        stream = Stream(engine, max_tokens=4000)
        engine.process.send_signal(signal.SIGTERM)
        assert stream.end()[-1]["choices"][0]["finish_reason"] == "abort"
        assert engine.end()[0] == 0


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with engine_process(tmp_path, scripted("serve"), "--shutdown-timeout", "300") as engine:
        engine.wait_until_healthy()
        stream = Stream(engine, max_tokens=4000)
        engine.process.send_signal(signal.SIGINT)
        while engine.client.get("/health").status_code == 200:
            time.sleep(0.01)
        engine.process.send_signal(signal.SIGINT)
        assert stream.end()[-1]["choices"][0]["finish_reason"] == "abort"
        assert engine.end()[0] == 0


def test_sigterm_while_loading_leaves_at_once(tmp_path: Path) -> None:
    with engine_process(tmp_path, scripted("slow-load")) as engine:
        assert engine.process.stdout is not None
        assert engine.process.stdout.readline() == "LOADING\n"
        with pytest.raises(httpx.ConnectError):
            engine.client.get("/health")
        engine.process.send_signal(signal.SIGTERM)
        assert engine.end(30)[0] == 0


@pytest.mark.parametrize(
    ("scenario", "failure_class", "said"),
    [
        ("device-fault", "GPUFault", "the device fell off the bus"),
        ("bug", "EngineDead", "ZeroDivisionError"),
    ],
)
def test_a_dead_core_tells_its_clients_and_ends_the_process(
    tmp_path: Path, scenario: str, failure_class: str, said: str
) -> None:
    with engine_process(tmp_path, scripted(scenario)) as engine:
        engine.wait_until_healthy()
        events = Stream(engine, max_tokens=1000).end()
        error = events[-1]["error"]
        assert error["code"] == 500
        assert said in error["message"]
        status, stderr = engine.end(SHUTDOWN_SECONDS + 20)
        assert status == 1
        document = engine.termination()
        assert (document["class"], document["phase"]) == (failure_class, "serving")
        assert said in document["message"]
        assert engine.termination_log.read_text() in stderr


def test_a_shutdown_that_hangs_is_cut_off(tmp_path: Path) -> None:
    with engine_process(tmp_path, scripted("hanging-shutdown")) as engine:
        engine.wait_until_healthy()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.end(SHUTDOWN_SECONDS + 20)[0] == 0


def test_an_unexpected_error_at_start_has_a_class_too(tmp_path: Path) -> None:
    with engine_process(tmp_path, scripted("load-error")) as engine:
        status, error = engine.end()
        assert status == 1
        assert engine.termination()["class"] == "EngineDead"
        assert "RuntimeError: no such device" in engine.termination()["message"]
        assert "Traceback" in error


def test_a_port_in_use_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with engine_process(tmp_path, scripted("serve"), "--port", port) as engine:
            assert engine.end()[0] == 2
            document = engine.termination()
    assert document["class"] == "InvalidConfiguration"
    assert f"127.0.0.1:{port}" in document["message"]


@pytest.mark.parametrize("flag", ["--port", "--control-port"])
def test_of_two_engines_that_start_at_once_one_is_told_before_it_loads(
    tmp_path: Path, flag: str
) -> None:
    port = str(free_port())
    with engine_process(tmp_path, scripted("slow-load"), flag, port) as first:
        assert first.process.stdout is not None
        assert first.process.stdout.readline() == "LOADING\n"
        with engine_process(tmp_path, scripted("slow-load"), flag, port) as second:
            assert second.end()[0] == 2
            document = second.termination()
        assert first.process.poll() is None
    assert document["class"] == "InvalidConfiguration"
    assert document["figures"]["field"] == flag
    assert f":{port}" in document["message"]


def test_a_bad_flag_ends_in_2_without_loading_torch(tmp_path: Path) -> None:
    module = ["-X", "importtime", "-m", *REAL]
    command = [sys.executable, *module, "--model", "m", "--block-size", "17"]
    log = tmp_path / "termination-log"
    log.touch()
    ended = subprocess.run(
        command,
        env={"TERMINATION_LOG_PATH": str(log), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    document = json.loads(log.read_text())
    assert document["class"] == "InvalidConfiguration"
    for named in ("--block-size", "17", "16"):
        assert named in document["message"]
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "plimsoll_engine.config" in imported
    assert not imported & {"torch", "transformers", "starlette", "grpc"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def test_the_real_engine_starts_answers_and_ends(tmp_path: Path, model: Path) -> None:
    flags = ["--model", str(model), "--served-model-name", "m", "--device", "cpu"]
    flags += ["--device-memory", "2Gi", "--control-port", str(free_port())]
    flags += ["--max-num-batched-tokens", "256", "--max-num-seqs", "8"]
    with engine_process(tmp_path, REAL, *flags) as engine:
        engine.wait_until_healthy()
        data = engine.client.get("/v1/models").json()["data"]
        assert [(each["id"], each["max_model_len"]) for each in data] == [("m", MAX_POSITIONS)]
        body = {"model": "m", "prompt": "The sky is", "max_tokens": 8, "temperature": 0}
        answers = [engine.client.post("/v1/completions", json=body).json() for _ in range(2)]
        assert answers[0]["usage"]["completion_tokens"] in range(1, 9)
        assert answers[0]["choices"] == answers[1]["choices"]
        # Case B18: however much KV cache there is, the model's positions are the ceiling.
        long = {"model": "m", "prompt": [1] * MAX_POSITIONS}
        assert engine.client.post("/v1/completions", json=long).status_code == 400
        assert "plimsoll:kv_blocks_usable" in engine.client.get("/metrics").text
        children = psutil.Process(engine.process.pid).children(recursive=True)
        engine.process.send_signal(signal.SIGTERM)
        status, error = engine.end()
        assert status == 0, error
        assert "Memory plan" in error
        assert not [child for child in children if child.is_running()]
        assert engine.termination_log.read_text() == ""


def test_a_model_that_is_not_there_ends_in_1(tmp_path: Path) -> None:
    with engine_process(tmp_path, REAL, "--model", str(tmp_path / "nothing")) as engine:
        assert engine.end()[0] == 1
        document = engine.termination()
        assert document["class"] == "ModelLoadFailed"
        assert "nothing" in document["message"]


def test_b18_a_length_beyond_the_model_names_both_numbers(tmp_path: Path, model: Path) -> None:
    flags = ("--model", str(model), "--device", "cpu", "--max-model-len", "8192")
    with engine_process(tmp_path, REAL, *flags) as engine:
        status, error = engine.end()
        assert status == 2
        assert "Traceback" not in error
        document = engine.termination()
        assert "8192" in document["message"]
        assert str(MAX_POSITIONS) in document["message"]
        assert document["suggestion"] == {"flag": "--max-model-len", "value": MAX_POSITIONS}
