"""A whole local cluster for end-to-end tests: started once, a namespace for each test.

The fixtures are made known to every test by tests/conftest.py:
``local_cluster`` is the running cluster, ``local_namespace`` a fresh namespace in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from support import vllm_image

if TYPE_CHECKING:
    from plimsoll_local.cluster import Cluster

Json = dict[str, Any]
T = TypeVar("T")

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class LocalCluster:
    """The cluster with what tests do to it. ``agent_log`` helps to explain a failure."""

    cluster: Cluster
    kubectl_path: Path

    @property
    def agent_log(self) -> str:
        return (self.cluster.directory / "agent.log").read_text()

    def kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = 90) -> str:
        """stdout of kubectl; raises CalledProcessError, with stderr, when it fails."""
        result = subprocess.run(
            [self.kubectl_path, *arguments],
            check=False,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig_path)},
        )
        if result.returncode != 0:
            raise subprocess.CalledProcessError(
                result.returncode, ["kubectl", *arguments], result.stdout, result.stderr
            )
        return result.stdout

    def get(self, path: str) -> Json | None:
        found: Json | None = self.cluster.get(path)
        return found

    def wait_for(self, read: Callable[[], T | None], what: str, seconds: float = 60) -> T:
        """The first value that is neither None nor false; fails the test after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not (value := read()):
            if time.monotonic() > deadline:
                pytest.fail(f"waited {seconds:g} s for {what}; agent:\n{self.agent_log[-2000:]}")
            time.sleep(_POLL_SECONDS)
        return value


@dataclass(frozen=True)
class LocalNamespace:
    """One namespace of the cluster."""

    cluster: LocalCluster
    name: str

    def kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = 90) -> str:
        return self.cluster.kubectl("-n", self.name, *arguments, stdin=stdin, seconds=seconds)

    def apply(self, *documents: Json) -> None:
        listing = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(listing))

    def pod(self, name: str) -> Json | None:
        return self.cluster.get(f"/api/v1/namespaces/{self.name}/pods/{name}")

    def container(self, pod: str, container: str = "main") -> Json | None:
        """The status of one container."""
        status = (self.pod(pod) or {}).get("status", {})
        for entry in (
            *status.get("initContainerStatuses", ()),
            *status.get("containerStatuses", ()),
        ):
            if entry["name"] == container:
                found: Json = entry
                return found
        return None

    def events(self, pod: str) -> list[Json]:
        listing = self.cluster.get(f"/api/v1/namespaces/{self.name}/events") or {"items": []}
        return [e for e in listing["items"] if e["involvedObject"]["name"] == pod]

    def wait_for_phase(self, pod: str, *phases: str, seconds: float = 60) -> Json:
        def read() -> Json | None:
            found = self.pod(pod)
            return found if found and found["status"].get("phase") in phases else None

        return self.cluster.wait_for(read, f"pod {pod} to be {' or '.join(phases)}", seconds)

    def wait_for_ready(self, pod: str, seconds: float = 60) -> Json:
        def read() -> Json | None:
            found = self.pod(pod)
            conditions = (found or {}).get("status", {}).get("conditions", ())
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
            return found if ready else None

        return self.cluster.wait_for(read, f"pod {pod} to be Ready", seconds)

    def wait_for_container(
        self, pod: str, holds: Callable[[Json], Any], what: str, container: str = "main"
    ) -> Json:
        def read() -> Json | None:
            found = self.container(pod, container)
            return found if found is not None and holds(found) else None

        return self.cluster.wait_for(read, f"container {container} of {pod}: {what}")

    def wait_for_log(self, pod: str, text: str, seconds: float = 60) -> str:
        """The pod's log as soon as ``text`` is in it."""

        def read() -> str | None:
            try:
                log = self.kubectl("logs", pod)
            except subprocess.CalledProcessError:
                return None
            return log if text in log else None

        return self.cluster.wait_for(read, f"{text!r} in the log of {pod}", seconds)


@contextmanager
def _namespace(cluster: LocalCluster) -> Iterator[LocalNamespace]:
    namespace = LocalNamespace(cluster, f"test-{uuid.uuid4().hex[:8]}")
    cluster.kubectl("create", "namespace", namespace.name)
    # No pod is admitted before the controller-manager has made the namespace's account.
    path = f"/api/v1/namespaces/{namespace.name}/serviceaccounts/default"
    cluster.wait_for(lambda: cluster.get(path), "the default service account")
    try:
        yield namespace
    finally:
        # Without waiting: what is left ends with the cluster.
        namespace.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
        cluster.kubectl("delete", "namespace", namespace.name, "--wait=false")


@pytest.fixture(scope="session")
def local_cluster() -> Iterator[LocalCluster]:
    """A running cluster with a node, until the end of the test session."""
    from plimsoll_local.binaries import ensure_binaries
    from plimsoll_local.cluster import Cluster

    binaries = ensure_binaries()
    # Tied to this process, so that a killed test run leaves nothing.
    cluster = Cluster.up(f"test-{os.getpid()}", images=vllm_image.build_images(), tied=True)
    try:
        yield LocalCluster(cluster, binaries.kubectl)
    finally:
        cluster.down()


@pytest.fixture
def local_namespace(local_cluster: LocalCluster) -> Iterator[LocalNamespace]:
    with _namespace(local_cluster) as namespace:
        yield namespace
