"""`plimsoll-local`: what cannot be done is said in one line, and an end is announced."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.testing

from plimsoll_local import __main__ as command_line
from plimsoll_local.cluster import Cluster, ClusterError
from plimsoll_local.relay import listen_on_loopback

SERVICE = {"spec": {"clusterIP": "10.0.0.7", "ports": [{"port": 80}]}}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    """One that has every Service and no process."""
    monkeypatch.setenv("PLIMSOLL_HOME", str(tmp_path))
    monkeypatch.setattr(Cluster, "get", lambda cluster, path: json.loads(json.dumps(SERVICE)))
    cluster = Cluster.find()
    cluster.directory.mkdir(parents=True)
    return cluster


def test_a_port_that_is_taken_is_named(cluster: Cluster) -> None:
    with listen_on_loopback() as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ClusterError, match=f"port {port} of 127.0.0.1: Address already in use"),
            cluster.proxy("default", "chat", 80, port),
        ):
            pass


def test_a_port_that_is_none_is_a_bad_call() -> None:
    result = typer.testing.CliRunner().invoke(
        command_line.app, ["proxy", "default/chat:80", "--port", "65536"]
    )
    assert result.exit_code == 2
    assert "65535" in result.output


PROXY = """
import sys
from plimsoll_local import __main__ as command_line
from plimsoll_local.cluster import Cluster, NoAnswer
command_line.PROXY_INTERVAL_S = 0.01
addresses = ["10.0.0.7", "10.0.0.7", None, "10.0.0.7", sys.argv.pop()]
def get(cluster, path):
    address = addresses.pop(0)
    if address is None:
        raise NoAnswer("busy")
    return {"spec": {"clusterIP": address, "ports": [{"port": 80}]}}
Cluster.get = get
Cluster.running = property(lambda cluster: bool(addresses))
sys.argv[1:] = ["proxy", "default/chat:80"]
command_line.main()
"""


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("10.0.0.8", "default/chat:80 was made anew; start the proxy again"),
        ("10.0.0.7", "cluster 'plimsoll' is gone, and the way to default/chat:80 with it"),
    ],
)
def test_a_proxy_ends_with_what_it_leads_to(tmp_path: Path, last: str, said: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROXY, last],
        capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PLIMSOLL_HOME": str(tmp_path)},
    )  # fmt: skip
    assert ended.stderr == f"plimsoll-local: {said}\n"
    assert ended.returncode == 1


def test_down_says_what_it_found(cluster: Cluster) -> None:
    runner = typer.testing.CliRunner()
    assert runner.invoke(command_line.app, ["down"]).output == "cluster 'plimsoll' is down\n"
    # Nothing is left beside the folder either.
    assert list(cluster.directory.parent.iterdir()) == []
    again = runner.invoke(command_line.app, ["down"])
    assert (again.exit_code, again.output) == (0, "no cluster named 'plimsoll'\n")
