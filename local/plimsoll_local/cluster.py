"""A local cluster as its user sees it: up, down, where its kubeconfig is, a way in.

In: a name. Out: a :class:`Cluster` on a folder of its own under the cache. Everything that runs is
below one supervisor process; ``down`` ends it and checks that nothing is left. Knows nothing of
what is installed in the cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from plimsoll_local import __version__, relay
from plimsoll_local.binaries import cache_home, ensure_binaries
from plimsoll_local.namespace import check_available
from plimsoll_local.processes import read_tail
from plimsoll_local.supervisor import NODE_NAME, RELAY_SOCKET

READY_DEADLINE_S = 120.0
DOWN_DEADLINE_S = 20.0


class ClusterError(Exception):
    """The cluster could not be started, found or ended; the message says why and what to do."""


@dataclass(frozen=True)
class Cluster:
    name: str
    directory: Path

    @classmethod
    def find(cls, name: str = "plimsoll") -> Cluster:
        return cls(name, cache_home() / "clusters" / name)

    @classmethod
    def up(
        cls,
        name: str = "plimsoll",
        report: Callable[[str], None] = lambda line: print(line, flush=True),
        images: dict[str, Any] | None = None,
    ) -> Cluster:
        """Starts a cluster and returns when its node is Ready.

        ``images`` adds to the images that pods may name (agent/images.py).
        Raises ClusterError, binaries.MissingTool or namespace.NamespacesUnavailable.
        """
        cluster = cls.find(name)
        if cluster.running:
            raise ClusterError(
                f"cluster {name!r} is up already; `plimsoll-local down --name {name}` ends it"
            )
        if len(str(cluster.directory / RELAY_SOCKET)) > relay.MAX_SOCKET_PATH:
            raise ClusterError(
                f"the folder {cluster.directory} has too long a name for a unix socket; set "
                "PLIMSOLL_HOME to a shorter one"
            )
        check_available()
        ensure_binaries(report)
        cluster.down()
        cluster.directory.mkdir(parents=True)
        (cluster.directory / "images.json").write_text(
            json.dumps({**build_images(), **(images or {})}, indent=2)
        )
        with (cluster.directory / "supervisor.log").open("wb") as output:
            supervisor = subprocess.Popen(
                [
                    sys.executable, "-m", "plimsoll_local.supervisor",
                    "--state", str(cluster.directory),
                ],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        (cluster.directory / "supervisor.json").write_text(
            json.dumps({"pid": supervisor.pid, "started": _start_time(supervisor.pid)})
        )
        try:
            cluster._wait_ready(supervisor, report)
        except BaseException:
            evidence = read_tail(cluster.directory / "supervisor.log", 40)
            cluster.down()
            print(evidence, file=sys.stderr)
            raise
        return cluster

    @property
    def kubeconfig_path(self) -> Path:
        return self.directory / "kubeconfig"

    @property
    def running(self) -> bool:
        return self._supervisor_pid() is not None

    def down(self) -> None:
        """Ends everything and removes the folder. Idempotent; also cleans up after a crash.

        Raises ClusterError when a process is left that cannot be ended.
        """
        pid = self._supervisor_pid()
        if pid is not None:
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + DOWN_DEADLINE_S
        while left := self.processes():
            if time.monotonic() > deadline:
                raise ClusterError(f"processes of cluster {self.name!r} do not end: {left}")
            if time.monotonic() > deadline - DOWN_DEADLINE_S / 2:
                for process in left:
                    _signal(process, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.directory, ignore_errors=True)

    def processes(self) -> list[int]:
        """Every process of this cluster, as seen from outside its namespace."""
        pid = self._supervisor_pid()
        found = [] if pid is None else [pid]
        record = self.directory / "namespace"
        if record.exists():
            namespace = record.read_text()
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and _in_namespace(entry, namespace):
                    found.append(int(entry.name))
        return found

    @contextlib.contextmanager
    def proxy(self, namespace: str, service: str, port: int, local: int = 0) -> Iterator[str]:
        """The URL of a loopback port of this process that leads to a Service's port.

        Raises ClusterError when there is no such Service.
        """
        found = self.get(f"/api/v1/namespaces/{namespace}/services/{service}")
        if found is None:
            raise ClusterError(f"there is no Service {service!r} in namespace {namespace!r}")
        ports = [entry["port"] for entry in found["spec"].get("ports", [])]
        if port not in ports:
            raise ClusterError(f"Service {service!r} has no port {port}; it has {ports}")
        target = f"{found['spec']['clusterIP']}:{port}"
        with relay.forward(self.directory / RELAY_SOCKET, target, local) as listening:
            yield f"http://127.0.0.1:{listening}"

    def get(self, path: str) -> Any:
        """GET of an API path as the administrator; None when it is not found.

        Raises ClusterError when the API server does not answer.
        """
        try:
            config = yaml.safe_load(self.kubeconfig_path.read_text())
        except OSError:
            raise ClusterError(
                f"cluster {self.name!r} is not up; `plimsoll-local up` starts it"
            ) from None
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        request = urllib.request.Request(
            cluster["server"] + path, headers={"Authorization": f"Bearer {user['token']}"}
        )
        try:
            with opener.open(request, timeout=10) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise ClusterError(f"GET {path}: {error}") from error
        except OSError as error:
            raise ClusterError(f"the API server does not answer: {error}") from error

    def _wait_ready(
        self, supervisor: subprocess.Popen[bytes], report: Callable[[str], None]
    ) -> None:
        started = time.monotonic()
        said = started
        waiting_for = "the API server"
        while True:
            if supervisor.poll() is not None:
                raise ClusterError(f"the cluster ended while waiting for {waiting_for}")
            if self.kubeconfig_path.exists():
                waiting_for = f"node {NODE_NAME}"
                with contextlib.suppress(ClusterError):
                    if _is_ready(self.get(f"/api/v1/nodes/{NODE_NAME}")):
                        return
            now = time.monotonic()
            if now - started > READY_DEADLINE_S:
                raise ClusterError(f"{waiting_for} was not ready after {READY_DEADLINE_S:.0f} s")
            if now - said > 10:
                said = now
                report(f"waiting for {waiting_for}, {now - started:.0f} s")
            time.sleep(0.1)

    def _supervisor_pid(self) -> int | None:
        """The supervisor, if the recorded process is still the one that was started."""
        record = self.directory / "supervisor.json"
        if not record.exists():
            return None
        document = json.loads(record.read_text())
        pid = int(document["pid"])
        return pid if _start_time(pid) == document["started"] else None


def build_images() -> dict[str, Any]:
    """The images that exist here: this project's own, as programs of this environment."""
    search = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    environment = {
        "PATH": search,
        "VIRTUAL_ENV": sys.prefix,
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        # No network leads out of the cluster: what is not in the cache is not to be had.
        "HF_HUB_OFFLINE": "1",
    }
    python = {"command": ["python3"], "env": environment}
    return {
        f"plimsoll/engine:{__version__}": {
            "entrypoint": ["python", "-m", "plimsoll_engine"],
            "env": environment,
        },
        f"plimsoll/operator:{__version__}": {
            "entrypoint": ["python", "-m", "plimsoll_operator"],
            "env": environment,
        },
        "python:local": python,
        "busybox:local": {"command": ["sh"], "env": {"PATH": search}},
    }


def _is_ready(node: Any) -> bool:
    conditions = (node or {}).get("status", {}).get("conditions", [])
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def _start_time(pid: int) -> int | None:
    """Clock ticks since boot at which a process started (proc(5), field 22); None if it is gone
    or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _in_namespace(entry: Path, namespace: str) -> bool:
    try:
        inside = os.readlink(entry / "ns" / "pid") == namespace
        return inside and _start_time(int(entry.name)) is not None
    except OSError:
        return False


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
