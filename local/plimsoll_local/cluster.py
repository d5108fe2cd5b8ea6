"""A local cluster as its user sees it: up, down, where its kubeconfig is, a way in.

In: a name. Out: a :class:`Cluster` on a folder of its own under the cache. Everything that runs is
below one supervisor process; ``down`` ends it and checks that nothing is left. Knows nothing of
what is installed in the cluster.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from plimsoll_local import __version__, relay
from plimsoll_local.binaries import cache_home, ensure_binaries
from plimsoll_local.interrupts import interrupts_deferred
from plimsoll_local.layout import (
    IMAGES,
    KUBECONFIG,
    NAMESPACE_RECORD,
    NODE_NAME,
    RELAY_SOCKET,
    SUPERVISOR_LOG,
    SUPERVISOR_RECORD,
)
from plimsoll_local.namespace import check_available
from plimsoll_local.processes import read_state, read_tail, tied_to

READY_DEADLINE_S = 120.0
DOWN_DEADLINE_S = 20.0


class ClusterError(Exception):
    """The cluster could not be started, found or ended; the message says why and what to do."""


class NoAnswer(ClusterError):
    """The API server did not answer this time; it may the next."""


@dataclass(frozen=True)
class Cluster:
    name: str
    directory: Path
    # Kept by the process that started it, to collect its status in the end.
    _supervisor: subprocess.Popen[bytes] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def find(cls, name: str = "plimsoll") -> Cluster:
        return cls(name, cache_home() / "clusters" / name)

    @classmethod
    def up(
        cls,
        name: str = "plimsoll",
        report: Callable[[str], None] = lambda line: print(line, flush=True),
        images: dict[str, Any] | None = None,
        tied: bool = False,
        api_server_flags: Sequence[str] = (),
    ) -> Cluster:
        """Starts a cluster and returns when its node is Ready.

        ``images`` adds to the images that pods may name (agent/images.py). A ``tied`` cluster ends
        with the calling thread, however that ends; otherwise it stays until ``down``.
        ``api_server_flags`` come after this project's own.
        Raises ClusterError, binaries.MissingTool or namespace.NamespacesUnavailable.
        """
        cluster = cls.find(name)
        cluster._check_name()
        check_available()
        ensure_binaries(report)
        with cluster._locked():
            if cluster.running:
                raise ClusterError(
                    f"cluster {name!r} is up already; `plimsoll-local down --name {name}` ends it"
                )
            cluster._end()
            every_image = {**build_images(), **(images or {})}
            supervisor = cluster._start(report, every_image, tied, api_server_flags)
        return cls(name, cluster.directory, supervisor)

    @property
    def kubeconfig_path(self) -> Path:
        return self.directory / KUBECONFIG

    @property
    def running(self) -> bool:
        return self._supervisor_pid() is not None

    def down(self) -> None:
        """Ends everything and removes the folder. Idempotent; also cleans up after a crash.

        Raises ClusterError when a process is left that cannot be ended.
        """
        if self.directory.exists():
            with self._locked():
                self._end()

    def processes(self) -> list[int]:
        """Every process of this cluster, as seen from outside its namespace."""
        supervisor = self._supervisor_pid()
        outside = [] if supervisor is None else [supervisor]
        try:
            record = json.loads((self.directory / NAMESPACE_RECORD).read_text())
        except FileNotFoundError:
            return outside
        inside = {
            pid: started
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit()
            and _in_namespace(entry, record["name"])
            and (started := _start_time(pid := int(entry.name))) is not None
        }
        # The kernel gives a name away again, so it counts only with the pid 1 that it had.
        return outside + (list(inside) if record["started"] in inside.values() else [])

    @contextlib.contextmanager
    def proxy(self, namespace: str, service: str, port: int, local: int = 0) -> Iterator[str]:
        """The URL of a loopback port of this process that leads to a Service's port.

        Raises ClusterError when there is no such Service or the loopback port is not to be had.
        """
        target = self.find_address(namespace, service, port)
        with contextlib.ExitStack() as stack:
            try:
                forward = relay.forward(self.directory / RELAY_SOCKET, target, local)
                listening = stack.enter_context(forward)
            except OSError as error:
                raise ClusterError(f"port {local} of 127.0.0.1: {error.strerror}") from None
            yield f"http://127.0.0.1:{listening}"

    def find_address(self, namespace: str, service: str, port: int) -> str:
        """Where a Service's port is inside the cluster. Raises ClusterError."""
        found = self.get(f"/api/v1/namespaces/{namespace}/services/{service}")
        if found is None:
            raise ClusterError(f"there is no Service {service!r} in namespace {namespace!r}")
        ports = [entry["port"] for entry in found["spec"].get("ports", [])]
        if port not in ports:
            raise ClusterError(f"Service {service!r} has no port {port}; it has {ports}")
        return f"{found['spec']['clusterIP']}:{port}"

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
            raise NoAnswer(f"the API server does not answer: {error}") from error

    def _check_name(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", self.name):
            raise ClusterError(
                f"{self.name!r} is no name for a cluster: small letters, digits, '-' and '.' are"
            )
        if len(str(self.directory / RELAY_SOCKET)) > relay.MAX_SOCKET_PATH:
            raise ClusterError(
                f"the folder {self.directory} has too long a name for a unix socket; set "
                "PLIMSOLL_HOME to a shorter one"
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One ``up`` or ``down`` of a name at a time. Whoever leaves no cluster takes the lock's file
        along, so who has waited for that file looks whether it is still the one with the name."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        path = self.directory.parent / f".{self.name}.lock"
        while True:
            with path.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if not _is_file(path, file.fileno()):
                    continue
                try:
                    yield
                finally:
                    if not self.directory.exists():
                        path.unlink(missing_ok=True)
                return

    def _start(
        self,
        report: Callable[[str], None],
        images: dict[str, Any],
        tied: bool,
        api_server_flags: Sequence[str],
    ) -> subprocess.Popen[bytes]:
        self.directory.mkdir(parents=True)
        (self.directory / IMAGES).write_text(json.dumps(images, indent=2))
        supervisor = None
        try:
            # What runs is recorded, or it could not be ended. A Ctrl-C that was put off is raised at
            # the end of the block, so the block is part of what is cleaned up after.
            with interrupts_deferred(), (self.directory / SUPERVISOR_LOG).open("wb") as output:
                supervisor = subprocess.Popen(
                    [
                        sys.executable, "-m", "plimsoll_local.supervisor",
                        "--state", str(self.directory),
                        *(f"--api-server-flag={flag}" for flag in api_server_flags),
                    ],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=tied_to(os.getpid()) if tied else None,  # noqa: PLW1509 - one system call
                )  # fmt: skip
                (self.directory / SUPERVISOR_RECORD).write_text(
                    json.dumps({"pid": supervisor.pid, "started": _start_time(supervisor.pid)})
                )
            self._wait_ready(supervisor, report)
        except BaseException as error:
            if isinstance(error, Exception):
                print(read_tail(self.directory / SUPERVISOR_LOG, 40), file=sys.stderr)
            Cluster(self.name, self.directory, supervisor)._end()
            raise
        return supervisor

    def _end(self) -> None:
        # A second Ctrl-C would leave processes or the folder behind.
        with interrupts_deferred():
            self._end_all()

    def _end_all(self) -> None:
        pid = self._supervisor_pid()
        if pid is not None:
            _signal(pid, signal.SIGTERM)
        started = time.monotonic()
        while left := self.processes():
            waited = time.monotonic() - started
            if waited > DOWN_DEADLINE_S:
                raise ClusterError(f"processes of cluster {self.name!r} do not end: {left}")
            if waited > DOWN_DEADLINE_S / 2:
                for process in left:
                    _signal(process, signal.SIGKILL)
            time.sleep(0.05)
        if self._supervisor is not None:
            self._supervisor.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

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
                waiting_for = f"node {NODE_NAME} and the account that pods run under"
                with contextlib.suppress(ClusterError):
                    # Before the controller-manager has made the account, pods are refused.
                    if _is_ready(self.get(f"/api/v1/nodes/{NODE_NAME}")) and self.get(
                        "/api/v1/namespaces/default/serviceaccounts/default"
                    ):
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
        try:
            document = json.loads((self.directory / SUPERVISOR_RECORD).read_text())
            pid = int(document["pid"])
        except (FileNotFoundError, ValueError):
            return None
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
    # A checkout under /tmp, say, would be hidden by the container's own.
    readable = [sys.prefix, sys.base_prefix, *_package_folders()]
    python = {"command": ["python3"], "env": environment, "readable": readable}
    return {
        f"plimsoll/engine:{__version__}": {
            "entrypoint": ["python", "-m", "plimsoll_engine"],
            "env": environment,
            "readable": readable,
        },
        f"plimsoll/operator:{__version__}": {
            "entrypoint": ["python", "-m", "plimsoll_operator"],
            "env": environment,
            "readable": readable,
        },
        "python:local": python,
        "busybox:local": {"command": ["sh"], "env": {"PATH": search}},
    }


def _package_folders() -> list[str]:
    """Where this project's packages are imported from (an editable install: the checkout)."""
    found = (find_spec(name) for name in ("plimsoll_operator", "plimsoll_engine", "plimsoll_wire"))
    return [str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin]


def _is_ready(node: Any) -> bool:
    conditions = (node or {}).get("status", {}).get("conditions", [])
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def _is_file(path: Path, descriptor: int) -> bool:
    """Whether ``path`` names the open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _start_time(pid: int) -> int | None:
    """None if it is gone or a zombie."""
    with contextlib.suppress(OSError):
        state, started = read_state(pid)
        return None if state == "Z" else started
    return None


def _in_namespace(entry: Path, namespace: str) -> bool:
    """Whether a process is in the pid namespace, or is the one whose children are."""
    with contextlib.suppress(OSError):
        return namespace in (
            os.readlink(entry / "ns" / "pid"),
            os.readlink(entry / "ns" / "pid_for_children"),
        )
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
