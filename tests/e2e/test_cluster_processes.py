"""A cluster leaves nothing behind, however it ends."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll_local.cluster import Cluster, ClusterError
from plimsoll_local.layout import SUPERVISOR_RECORD

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


def test_helpers_come_back_and_a_cluster_without_its_folder_ends(cluster: Cluster) -> None:
    # `up` has promised that pods are taken, which needs this account.
    assert cluster.get("/api/v1/namespaces/default/serviceaccounts/default") is not None
    for name in ("plimsoll_local.services", "plimsoll_local.agent"):
        [before] = [pid for pid in cluster.processes() if name in _command(pid)]
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            after = [pid for pid in cluster.processes() if name in _command(pid)]
            if after and after != [before]:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"{name} was not started again")
    (cluster.directory / SUPERVISOR_RECORD).unlink()
    assert wait_until_empty(cluster, seconds=30) == []


TIED = """
import sys, time
from plimsoll_local.cluster import Cluster
Cluster.up(sys.argv[1], tied=True)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_tied_cluster_ends_with_the_process_that_started_it() -> None:
    cluster = Cluster.find(f"t{uuid.uuid4().hex[:6]}")
    owner = subprocess.Popen(
        [sys.executable, "-c", TIED, cluster.name], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        with owner.stdout as output:
            assert any(line == "ready\n" for line in output)
            assert len(cluster.processes()) > 5
            owner.kill()
            owner.wait()
        assert wait_until_empty(cluster, seconds=30) == []
    finally:
        owner.kill()
        owner.wait()
        cluster.down()


UP = """
import sys
from plimsoll_local.cluster import Cluster
Cluster.up(sys.argv[1])
"""


def test_an_interrupted_start_leaves_nothing() -> None:
    """Also when the user is impatient, and though this cluster is tied to nobody."""
    cluster = Cluster.find(f"i{uuid.uuid4().hex[:6]}")
    owner = subprocess.Popen([sys.executable, "-c", UP, cluster.name], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not cluster.processes() and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(3):
            owner.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert owner.wait(60) == -signal.SIGINT
        assert cluster.processes() == []
        assert not cluster.directory.exists()
    finally:
        owner.kill()
        owner.wait()
        cluster.down()


def _command(pid: int) -> str:
    """Empty for a process that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
