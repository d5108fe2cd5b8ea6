"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler as child processes.

In: a folder for state and logs, the binaries, and where the API server listens. Out: a Kubernetes
API that answers /readyz, and an administrator's kubeconfig. Two uses: plain, on loopback, for tests
that need an API server alone; and inside the local cluster's namespace, where pods reach the API
server by the node's bridge address. Knows nothing of nodes and pods.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from plimsoll_local.binaries import Binaries
from plimsoll_local.certificates import write_certificates
from plimsoll_local.processes import read_tail, start_child, stop_children

SERVICE_CIDR = "10.0.0.0/24"
# The first address of the range: the Service `kubernetes`.
KUBERNETES_SERVICE_IP = "10.0.0.1"
# Seen: 5 s on two free cores; the rest is for machines with other work to do.
READY_DEADLINE_S = 90.0
# What the slice needs of the controllers; node IPAM and cloud parts have no meaning here.
_CONTROLLERS = "*,-nodeipam,-cloud-node-lifecycle"


class Component(Enum):
    CONTROLLER_MANAGER = "kube-controller-manager"
    SCHEDULER = "kube-scheduler"


class ControlPlaneFailed(Exception):
    """A component ended or did not become ready; the message holds the end of its log."""


@dataclass(frozen=True)
class Endpoint:
    """Where the API server listens. ``advertise`` is the address pods are told."""

    bind: str = "127.0.0.1"
    advertise: str = "127.0.0.1"
    # None: a free port.
    port: int | None = None


class ControlPlane:
    """A context manager: entering starts everything and waits, leaving stops everything."""

    def __init__(
        self,
        directory: Path,
        binaries: Binaries,
        components: frozenset[Component] = frozenset(Component),
        endpoint: Endpoint = Endpoint(),
        api_server_flags: Sequence[str] = (),
    ) -> None:
        self._directory = directory
        self._binaries = binaries
        self._components = components
        self._endpoint = endpoint
        self._api_server_flags = tuple(api_server_flags)
        self._token = secrets.token_hex(16)
        self._children: list[subprocess.Popen[bytes]] = []
        self.port = endpoint.port or _free_port()
        self.kubeconfig = directory / "kubeconfig"

    @property
    def server(self) -> str:
        """The API server's URL for processes beside it."""
        return f"https://{self._endpoint.advertise}:{self.port}"

    @property
    def certificate_authority(self) -> Path:
        return self._directory / "pki" / "ca.crt"

    @property
    def token(self) -> str:
        """A bearer token of group system:masters."""
        return self._token

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Raises ControlPlaneFailed, with everything stopped again."""
        self.launch()
        self.complete()

    def launch(self) -> None:
        """Starts etcd and the API server and writes the kubeconfig, without waiting."""
        try:
            self._prepare()
            self._start_etcd()
            self._start_api_server()
        except BaseException:
            self.stop()
            raise

    def complete(self) -> None:
        """Waits for the API server and starts the rest. Raises as ``start`` does."""
        try:
            self._wait_ready()
            if Component.CONTROLLER_MANAGER in self._components:
                self._start_controller_manager()
            if Component.SCHEDULER in self._components:
                self._start_scheduler()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        stop_children(self._children)
        self._children.clear()

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(child.pid for child in self._children)

    def failed_component(self) -> str | None:
        """The program of a component that has ended, with the end of its log."""
        for child in self._children:
            if child.poll() is not None:
                name = Path(str(child.args[0])).name  # type: ignore[index]
                log = self._directory / f"{name}.log"
                return f"{name} ended with status {child.returncode}:\n{read_tail(log)}"
        return None

    def _prepare(self) -> None:
        # A cluster is throw-away: what a crashed one left is not taken up again.
        for leftover in ("etcd", "pki"):
            shutil.rmtree(self._directory / leftover, ignore_errors=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        write_certificates(
            self._directory / "pki",
            names=["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"],
            addresses=sorted({"127.0.0.1", self._endpoint.advertise, KUBERNETES_SERVICE_IP}),
        )
        tokens = self._directory / "pki" / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(f"{self._token},admin,admin,system:masters\n")
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(
            render_kubeconfig(self.server, self.certificate_authority, self._token)
        )

    def _start_etcd(self) -> None:
        client, peer = _free_port(), _free_port()
        self._etcd = f"http://127.0.0.1:{client}"
        self._start(
            self._binaries.etcd,
            f"--data-dir={self._directory / 'etcd'}",
            "--unsafe-no-fsync",
            "--log-level=error",
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        )

    def _start_api_server(self) -> None:
        pki = self._directory / "pki"
        self._start(
            self._binaries.kube_apiserver,
            f"--etcd-servers={self._etcd}",
            f"--bind-address={self._endpoint.bind}",
            f"--advertise-address={self._endpoint.advertise}",
            f"--secure-port={self.port}",
            f"--tls-cert-file={pki / 'apiserver.crt'}",
            f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--cert-dir={pki}",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={pki / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--allow-privileged=true",
            "--profiling=false",
            "--kubelet-preferred-address-types=InternalIP,Hostname",
            *self._api_server_flags,
        )
        # `--kubelet-certificate-authority` is left out: the node agent's certificate is its own.

    def _start_controller_manager(self) -> None:
        self._start(
            self._binaries.kube_controller_manager,
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={self._directory / 'pki' / 'sa.key'}",
            f"--root-ca-file={self.certificate_authority}",
            "--use-service-account-credentials",
            f"--controllers={_CONTROLLERS}",
            "--leader-elect=false",
            "--secure-port=0",
            "--profiling=false",
        )

    def _start_scheduler(self) -> None:
        self._start(
            self._binaries.kube_scheduler,
            f"--kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--secure-port=0",
            "--profiling=false",
        )

    def _start(self, program: Path, *arguments: str) -> None:
        log = self._directory / f"{program.name}.log"
        self._children.append(start_child([program, *arguments], log))

    def _wait_ready(self) -> None:
        context = ssl.create_default_context(cafile=str(self.certificate_authority))
        request = urllib.request.Request(
            f"{self.server}/readyz", headers={"Authorization": f"Bearer {self._token}"}
        )
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        deadline = time.monotonic() + READY_DEADLINE_S
        answer = "no answer"
        while time.monotonic() < deadline:
            failed = self.failed_component()
            if failed is not None:
                raise ControlPlaneFailed(failed)
            try:
                with opener.open(request, timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, OSError) as error:
                answer = str(error)
            time.sleep(0.1)
        log = self._directory / "kube-apiserver.log"
        raise ControlPlaneFailed(
            f"the API server was not ready after {READY_DEADLINE_S:.0f} s ({answer}):\n"
            f"{read_tail(log)}"
        )


def render_kubeconfig(server: str, certificate_authority: Path, token: str) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "plimsoll",
            "clusters": [
                {
                    "name": "plimsoll",
                    "cluster": {
                        "server": server,
                        "certificate-authority": str(certificate_authority),
                    },
                }
            ],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "plimsoll", "context": {"cluster": "plimsoll", "user": "admin"}}],
        }
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
