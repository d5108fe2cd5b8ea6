"""A cluster leaves nothing behind, however it ends."""

import os
import signal
import time
import uuid
from collections.abc import Iterator

import pytest

from plimsoll_local.cluster import Cluster, ClusterError

pytestmark = pytest.mark.e2e


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    started = Cluster.up(f"p{uuid.uuid4().hex[:6]}")
    try:
        yield started
    finally:
        started.down()


def wait_until_empty(cluster: Cluster, seconds: float = 10) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := cluster.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_down_leaves_neither_process_nor_folder(cluster: Cluster) -> None:
    assert len(cluster.processes()) > 5
    with pytest.raises(ClusterError, match="is up already"):
        Cluster.up(cluster.name)
    with (
        pytest.raises(ClusterError, match="no Service 'absent' in namespace 'default'"),
        cluster.proxy("default", "absent", 80),
    ):
        pass
    with (
        pytest.raises(ClusterError, match=r"no port 80; it has \[443\]"),
        cluster.proxy("default", "kubernetes", 80),
    ):
        pass
    processes = cluster.processes()
    cluster.down()
    assert [pid for pid in processes if os.path.exists(f"/proc/{pid}")] == []
    assert not cluster.directory.exists()
    with pytest.raises(ClusterError, match="is not up"):
        cluster.get("/version")
    cluster.down()


@pytest.mark.parametrize("victim", ["supervisor", "kube-apiserver"])
def test_a_killed_part_takes_the_cluster_along(cluster: Cluster, victim: str) -> None:
    killed = [pid for pid in cluster.processes() if victim in _command(pid)]
    os.kill(min(killed), signal.SIGKILL)
    assert wait_until_empty(cluster) == []
    assert not cluster.running


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode()
