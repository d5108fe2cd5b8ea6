"""Ranks in several pods: processes play the pods, gloo on the loopback address the network."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from plimsoll_engine.config import ConfigError, DeviceType, EngineConfig, parse_args
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.parallel.channels import gather_ranks, join_group
from plimsoll_engine.parallel.executor import TensorParallelExecutor
from plimsoll_engine.pod_group import PodGroup
from plimsoll_engine.sampling_params import SamplingParams
from plimsoll_engine.termination import EngineFailure, FailureClass
from support.engine_server import byte_tokenizer
from support.greedy_loop import generate
from support.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPTS = [random.Random(length).choices(range(VOCAB_SIZE), k=length) for length in (3, 40)]
TOKEN = "a secret of the group"
SECONDS = 120


def free_port() -> int:
    """The first of two that are free: the ranks' own is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            # Below the ports that the system gives away by itself in the meantime.
            port = random.randrange(10_000, 30_000)
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Eight query heads and two KV heads.
    folder = save_tiny_model(FAMILIES["llama-tied-biased"], tmp_path_factory.mktemp("model"))
    byte_tokenizer().save_pretrained(folder)
    return folder


def config_of(model: Path, ranks: int, pods: PodGroup | None = None) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        device=DeviceType.CPU,
        device_memory=4 << 30,
        host="127.0.0.1",
        tensor_parallel_size=ranks,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        pods=pods,
    )


@dataclass
class Pod:
    """A whole engine process of the group; ``address`` is that of its HTTP port."""

    process: subprocess.Popen[str]
    address: str
    termination_log: Path

    def health(self) -> int | None:
        try:
            return httpx.get(f"{self.address}/health", timeout=5).status_code
        except httpx.HTTPError:
            return None

    def end(self) -> tuple[int, dict[str, Any]]:
        """Exit status and termination message."""
        self.process.wait(SECONDS)
        text = self.termination_log.read_text()
        return self.process.returncode, json.loads(text) if text else {}


@contextmanager
def pod(
    folder: Path, model: Path, port: int, index: int, size: int = 2, ranks: int = 4
) -> Iterator[Pod]:
    log = folder / f"termination-log-{index}"
    log.touch()
    http = free_port()
    settings = {
        "model": model,
        "served-model-name": "m",
        "device": "cpu",
        "device-memory": "4Gi",
        "tensor-parallel-size": ranks,
        "max-num-batched-tokens": 64,
        "max-num-seqs": 8,
        "host": "127.0.0.1",
        "port": http,
        "control-port": 0,
        "group-port": port,
    }
    environment = {
        "LWS_LEADER_ADDRESS": "127.0.0.1",
        "LWS_GROUP_SIZE": str(size),
        "LWS_WORKER_INDEX": str(index),
        "PLIMSOLL_GROUP_TOKEN": TOKEN,
        "GLOO_SOCKET_IFNAME": "lo",
        "TERMINATION_LOG_PATH": str(log),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    with subprocess.Popen(
        [sys.executable, "-m", "plimsoll_engine", *flags], text=True, env=environment
    ) as process:
        try:
            yield Pod(process, f"http://127.0.0.1:{http}", log)
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize(("size", "ranks"), [(2, 4), (2, 2)])
def test_ranks_in_several_pods_give_the_tokens_of_one_rank(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, size: int, ranks: int
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    lone = ModelRunner(config_of(model, 1), "cpu")
    limits = lone.load()
    expected = [each.token_ids for each in generate(lone, PROMPTS, GREEDY, block_size=16)]
    port = free_port()
    pods = PodGroup("127.0.0.1", size, 0, port, TOKEN)
    executor = TensorParallelExecutor(config_of(model, ranks, pods), "cpu")
    with pod(tmp_path, model, port, 1, size, ranks) as member:
        try:
            assert executor.load() == limits
            assert len(executor.rank_pids) == ranks // size
            assert member.health() == 200
            figures = executor.profile(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=128)
            # What one pod's ranks hold, not what all do: each pod has a memory of its own.
            in_pod = ranks // size
            head_bytes = lone.cache.layout.bytes_per_block // limits.num_kv_heads
            assert figures.bytes_per_block == in_pod * head_bytes
            assert figures.weights < lone.decoder.num_bytes() * (in_pod + 1) / ranks + (1 << 20)
            executor.resize_kv(40)
            assert executor.memory().free < figures.total
            answers = generate(executor, PROMPTS, GREEDY, block_size=16)
            assert [each.token_ids for each in answers] == expected
        finally:
            executor.shutdown()
        # The leader has gone without a word: so does the member.
        status, said = member.end()
        assert status == 1
        assert said["class"] == FailureClass.COLLECTIVE_FAILURE


@pytest.mark.parametrize("harm", ["the pod is killed", "a rank is killed", "a rank hangs"])
def test_the_end_of_any_member_is_the_end_of_the_group(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port = free_port()
    pods = PodGroup("127.0.0.1", 2, 0, port, TOKEN)
    executor = TensorParallelExecutor(config_of(model, 2, pods), "cpu")
    with pod(tmp_path, model, port, 1, 2, 2) as member:
        try:
            executor.load()
            parent, rank = psutil.Process(member.process.pid).children(recursive=True)
            if harm == "the pod is killed":
                member.process.kill()
            else:
                rank.send_signal(signal.SIGKILL if "killed" in harm else signal.SIGSTOP)
            harmed = time.monotonic()
            with pytest.raises(EngineFailure) as failed:
                generate(executor, PROMPTS, GREEDY, block_size=16)
            assert time.monotonic() - harmed < 30
            assert failed.value.failure_class is FailureClass.COLLECTIVE_FAILURE
            assert "rank 1 of 2" in failed.value.message
            said = "hangs" if harm == "a rank hangs" else "is gone, and with it pod 1 of the group"
            assert said in failed.value.message
        finally:
            executor.shutdown()
        rank.send_signal(signal.SIGCONT) if rank.is_running() else None
        member.process.wait(SECONDS)
        assert member.process.returncode != 0
        assert not psutil.wait_procs([parent, rank], timeout=SECONDS)[1]


def test_the_leader_serves_and_a_group_that_is_told_to_leave_drains(
    tmp_path: Path, model: Path
) -> None:
    port = free_port()
    with pod(tmp_path, model, port, 0) as leader, pod(tmp_path, model, port, 1) as member:
        wait_until(lambda: leader.health() == 200, "the leader is not ready")
        assert member.health() == 200
        assert httpx.get(f"{member.address}/v1/models").status_code == 404
        body = {"model": "m", "prompt": "abc", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{leader.address}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        # As the kubelets of both nodes would, the member's first.
        member.process.send_signal(signal.SIGTERM)
        answer = httpx.post(f"{leader.address}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200
        leader.process.send_signal(signal.SIGTERM)
        assert leader.end() == (0, {})
        assert member.end() == (0, {})


def test_a_member_ends_with_a_leader_that_is_killed(tmp_path: Path, model: Path) -> None:
    port = free_port()
    with (
        pod(tmp_path, model, port, 0, 2, 2) as leader,
        pod(tmp_path, model, port, 1, 2, 2) as other,
    ):
        wait_until(lambda: leader.health() == 200, "the leader is not ready")
        processes = psutil.Process(other.process.pid).children(recursive=True)
        leader.process.kill()
        status, said = other.end()
        assert status == 1
        assert "the leader at 127.0.0.1 is gone" in said["message"]
        assert not psutil.wait_procs(processes, timeout=SECONDS)[1]


def test_only_who_knows_the_token_joins() -> None:
    group = PodGroup("127.0.0.1", 2, 0, free_port(), TOKEN)
    joined: dict[int, Any] = {}
    gathering = threading.Thread(
        target=lambda: joined.update(gather_ranks(group, 4, "127.0.0.1", 60))
    )
    gathering.start()
    member = replace(group, index=1)

    def join(rank: int, token: str = TOKEN) -> Any:
        return join_group(replace(member, token=token), rank, 7, leaving=lambda: False, seconds=30)

    first = join(2)
    with (
        socket.create_connection(("127.0.0.1", group.port)),
        pytest.raises(EngineFailure) as refused,
    ):
        # One that says nothing is connected meanwhile, and holds up nobody.
        join(3, token="another")
    assert refused.value.failure_class is FailureClass.INVALID_CONFIGURATION
    assert "PLIMSOLL_GROUP_TOKEN" in refused.value.message
    stranger = join(2)
    assert stranger.poll(30)
    with pytest.raises((EOFError, OSError)):
        stranger.recv()
    second = join(3)
    gathering.join(30)
    assert sorted(joined) == [2, 3]
    assert joined[3][1].own_bytes == 7
    for connection in (first, second, stranger, *(each for each, _ in joined.values())):
        connection.close()


def test_pods_that_do_not_come_are_named() -> None:
    group = PodGroup("127.0.0.1", 2, 0, free_port(), TOKEN)
    with pytest.raises(EngineFailure, match=r"ranks \[2, 3\] of 4 did not join within 0.1 s"):
        gather_ranks(group, 4, "127.0.0.1", 0.1)
    member = replace(group, index=1)
    with pytest.raises(EngineFailure, match=r"the leader at 127.0.0.1:\d+ cannot be reached"):
        join_group(member, 2, 0, leaving=lambda: True, seconds=60)


LWS = {
    "LWS_LEADER_ADDRESS": "leader.svc",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "PLIMSOLL_GROUP_TOKEN": "s",
}


def test_the_variables_of_a_leader_worker_set() -> None:
    flags = ["--model", "m", "--tensor-parallel-size", "4"]
    pods = parse_args(flags, LWS).pods
    assert pods == PodGroup("leader.svc", 2, 1, 8002, "s")
    assert list(pods.ranks_of(1, 4)) == [2, 3]
    assert "token" not in repr(pods)
    # A group of one pod is none, whatever else is set.
    assert parse_args(flags, {"LWS_GROUP_SIZE": "1"} | {"LWS_WORKER_INDEX": "0"}).pods is None


@pytest.mark.parametrize(
    ("changes", "ranks", "named"),
    [
        ({}, 3, ["--tensor-parallel-size", "multiple of LWS_GROUP_SIZE (2)"]),
        ({"LWS_GROUP_SIZE": "two"}, 4, ["LWS_GROUP_SIZE", "two"]),
        ({"LWS_WORKER_INDEX": "2"}, 4, ["LWS_WORKER_INDEX", "0 to 1"]),
        ({"LWS_WORKER_INDEX": ""}, 4, ["LWS_WORKER_INDEX", "to be set"]),
        ({"LWS_LEADER_ADDRESS": ""}, 4, ["LWS_LEADER_ADDRESS", "to be set"]),
        ({"PLIMSOLL_GROUP_TOKEN": ""}, 4, ["PLIMSOLL_GROUP_TOKEN", "Secret"]),
    ],
)
def test_a_group_that_cannot_be_is_refused_by_name(
    changes: dict[str, str], ranks: int, named: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_args(["--model", "m", "--tensor-parallel-size", str(ranks)], LWS | changes)
    for text in named:
        assert text in str(refused.value)
